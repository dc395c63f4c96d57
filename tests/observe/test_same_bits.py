"""Steps that are computed again: where their bits differ, and nothing was changed, that is an alarm."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from config_kit import configured
from hook_kit import hook
from mingpt.errors import FINISHED
from mingpt.observe.earlier import SameBits
from mingpt.observe.events import AttemptEnded, BitsDiffer, Event, SnapshotCommitted, StepDone
from mingpt.observe.jsonl import MetricsLog
from mingpt.observe.trace import RECORD, Trace
from mingpt.snapshot.attempts import RunRecord
from mingpt.snapshot.rewinding import rewind
from mingpt.snapshot.store import Store
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from poison_kit import POISONED


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., int]]:
    threads = torch.get_num_threads()
    yield lambda *overrides: attempt([*POISONED, f"run.dir={tmp_path}/run", *overrides], Lifetime())
    torch.set_num_threads(threads)


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


def observed(run_dir: str, number: int) -> tuple[MetricsLog, SameBits, list[BitsDiffer]]:
    """The metrics and the comparison of an attempt of a run that begins at step 0."""
    config, differ = configured(f"run.dir={run_dir}"), list[BitsDiffer]()
    provenance = {"config": config.model_dump(), "history": [{"from_step": 0, "numerics": {"device": "cpu"}}]}
    log = MetricsLog(run_dir, number, print)
    record = RunRecord(number, None, provenance)
    return log, SameBits(config, record, log.write, differ.append, print), differ


def test_only_steps_and_the_end_are_compared(tmp_path: Path) -> None:
    """The threads of the snapshots' writers publish, too. A norm of float64 has the same bits again."""
    trace, (log, same, _) = Trace(f"{tmp_path}/run", 1, print), observed(f"{tmp_path}/run", 1)
    steps = [StepDone(step, 2.0, 1 / 3, (), ()) for step in (1, 2)]
    events: list[Event] = [*steps, AttemptEnded(2, False, None)]
    for event in events:
        for observer in (trace, same, log):
            observer.on(event)
    _, same, differ = observed(f"{tmp_path}/run", 2)
    same.on(steps[0])
    same._thread.join(60)
    same._new.append(StepDone(2, 3.0, 1 / 3, (), ()))  # as if the main thread were about to compare it
    same.on(SnapshotCommitted(2, "d", 0.1))
    assert differ == []
    same.on(AttemptEnded(2, True, None))
    assert [(event.step, event.loss) for event in differ] == [(2, (2.0, 3.0))]
