"""Steps that are computed again: where their bits differ, and nothing was changed, that is an alarm."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mingpt.errors import FINISHED
from mingpt.observe.trace import RECORD
from mingpt.snapshot.store import Store
from mingpt.tiers.rewinding import rewind
from tests.kits.hook_kit import hook


def again(tmp_path: Path, number: int, sick: int | None = None) -> None:
    """Go back to step 10. sick: at this step that attempt has computed another bit."""
    rewind(f"{tmp_path}/run", Store(f"{tmp_path}/run/snapshots"), 10, "/dev/shm", print)
    path = tmp_path / f"run/trace/attempt-{number:05d}-{(1 if number == 1 else 11):09d}.bin"
    records = np.frombuffer(path.read_bytes(), RECORD).copy()
    if sick:
        norm = records["norm"]
        norm[records["step"] == sick] = np.nextafter(norm, np.inf, dtype=norm.dtype)[records["step"] == sick]
    path.write_bytes(records.tobytes())


def test_equal_bits_are_no_news_and_different_ones_an_alarm(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("train.max_steps=20") == FINISHED
    again(tmp_path, 1)
    assert train("train.max_steps=20") == FINISHED  # attempt 3: the second one was the way back
    assert "ALARM" not in capsys.readouterr().out
    again(tmp_path, 1, sick=14)
    again(tmp_path, 3, sick=13)
    with hook() as there:
        assert train("train.max_steps=24", f"health.notify={there.url}") == FINISHED
    [alarm] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ALARM")]
    assert all(words in alarm for words in ("ALARM: step 13 ", " in attempt 3, ", " in attempt 6. "))
    assert there.events() == ["different bits", "finished"]
    assert there.bodies()[0]["text"] == alarm.removeprefix("ALARM: ")


def test_what_was_changed_may_differ(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("train.max_steps=20") == FINISHED
    for number, changed in ((1, "optimizer.lr=0.5"), (3, "reduce=fast")):
        again(tmp_path, number)
        assert train("train.max_steps=20", changed, "resume.changed=true") == FINISHED
    assert "ALARM" not in capsys.readouterr().out


def test_a_damaged_trace_raises_no_alarm(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bit of a step's number is flipped: its bits are not those of the step that it seems to be."""
    assert train("train.max_steps=20") == FINISHED
    rewind(f"{tmp_path}/run", Store(f"{tmp_path}/run/snapshots"), 10, "/dev/shm", print)
    path = tmp_path / "run/trace/attempt-00001-000000001.bin"
    records = np.fromfile(path, RECORD)
    records["step"][15] ^= 1  # step 16 seems to be step 17, which is recorded, too
    records[[15, 16]] = records[[16, 15]]
    records.tofile(path)
    assert train("train.max_steps=20") == FINISHED
    assert "ALARM" not in capsys.readouterr().out
