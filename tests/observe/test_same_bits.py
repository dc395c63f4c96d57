"""Steps that are computed again: where their bits differ, and nothing was changed, that is an alarm."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mingpt.errors import FINISHED
from mingpt.observe.trace import RECORD, Records
from mingpt.snapshot.store import Store
from mingpt.tiers.rewinding import rewind
from tests.kits.hook_kit import hook


def again(tmp_path: Path, number: int, change: Callable[[Records], None] | None = None) -> None:
    """Go back to step 10. change: of what that attempt has recorded."""
    rewind(f"{tmp_path}/run", Store(f"{tmp_path}/run/snapshots"), 10, "/dev/shm", print)
    if change:
        [path] = tmp_path.glob(f"run/trace/attempt-{number:05d}-*.bin")
        records = np.fromfile(path, RECORD)
        change(records)
        records.tofile(path)


def sick(step: int) -> Callable[[Records], None]:
    """It has computed another bit at this step."""

    def change(records: Records) -> None:
        norm, there = records["norm"], records["step"] == step
        norm[there] = np.nextafter(norm[there], np.inf)

    return change


def flipped(records: Records) -> None:
    """One bit of a step's number: step 16 seems to be step 17, which is recorded, too."""
    records["step"][15] ^= 1
    records[[15, 16]] = records[[16, 15]]


def test_equal_bits_are_no_news_and_different_ones_an_alarm(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("train.max_steps=20") == FINISHED
    again(tmp_path, 1)
    assert train("train.max_steps=20") == FINISHED  # attempt 3: the second one was the way back
    assert "ALARM" not in capsys.readouterr().out
    again(tmp_path, 1, sick(14))
    again(tmp_path, 3, sick(13))
    with hook() as there:
        assert train("train.max_steps=24", f"health.notify={there.url}") == FINISHED
    [alarm] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ALARM")]
    assert all(words in alarm for words in ("ALARM: step 13 ", " in attempt 3, ", " in attempt 6. "))
    assert there.events() == ["different bits", "finished"]
    assert there.bodies()[0]["text"] == alarm.removeprefix("ALARM: ")


@pytest.mark.parametrize(
    ("first", "then", "change"),
    [
        ("reduce=exact", "optimizer.lr=0.5", None),
        ("reduce=fast", "reduce=fast", sick(14)),  # which promises no bits
        ("reduce=exact", "reduce=exact", flipped),
    ],
)
def test_what_was_changed_may_differ_and_a_damaged_trace_says_nothing(
    train: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    first: str,
    then: str,
    change: Callable[[Records], None] | None,
) -> None:
    assert train("train.max_steps=20", first) == FINISHED
    again(tmp_path, 1, change)
    assert train("train.max_steps=20", then, "resume.changed=true") == FINISHED
    assert "ALARM" not in capsys.readouterr().out
