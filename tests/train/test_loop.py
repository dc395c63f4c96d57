"""Whole attempts of a world of one, whose loop is looked into: late figures, failing observers, a claim meanwhile."""

import errno
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from mingpt.compute.stats import Flags, StatsExchange
from mingpt.data.source import sampled_split
from mingpt.errors import FINISHED, STOPPED, USER_ERROR
from mingpt.observe.events import (
    AttemptEnded,
    Event,
    Observer,
    Observers,
    StepDone,
)
from mingpt.snapshot.attempts import Attempt
from mingpt.train import loop, running
from mingpt.train.attempt import attempt
from mingpt.train.figures import DelayedRead, Moment
from mingpt.train.loop import Run
from mingpt.train.reporter import Pace
from mingpt.train.resume import other_validation
from mingpt.world.clock import Clock
from mingpt.world.lifetime import Lifetime, Phase
from mingpt.world.world import World
from tests.kits.run_kit import TINY
from tests.kits.verb_kit import store, verified

STEPS = 4


class Recorder:
    """fails: at which events."""

    def __init__(self, fails: type | tuple[()] = ()) -> None:
        self.events, self.fails = list[Event](), fails

    def on(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, self.fails):
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


Train = Callable[..., tuple[int, Run]]


@pytest.fixture
def train(tmp_path: Path, text: Path, cache: Path, outlived: None, monkeypatch: pytest.MonkeyPatch) -> Train:
    def trained(
        *overrides: str, observers: tuple[Observer, ...] = (), change: Callable[[Run], Run] = lambda run: run
    ) -> tuple[int, Run]:
        """An attempt's exit code, and what its loop called. change: is given that before, and may make another one."""
        runs, train = list[Run](), loop.train

        def begin(run: Run) -> int:
            runs.append(change(run))
            return train(runs[0])

        length = (f"train.max_steps={STEPS}", f"schedule.decay_steps={STEPS}", "train.eval_every=2")
        places = (f"run.dir={tmp_path}/run", f"data.path={text}", f"data.cache_dir={cache}", "snapshot.every_steps=2")
        with monkeypatch.context() as patch:
            patch.setattr(loop, "train", begin)
            patch.setattr(running, "open_observers", lambda *_: Observers(observers, print))
            return attempt([*TINY, *length, *places, *overrides], Lifetime()), runs[0]

    return trained


def test_weights_of_a_damaged_snapshot_are_not_kept_if_no_other_is_left(train: Train, tmp_path: Path) -> None:
    """Its weights are good and read first; then comes the damaged part."""
    few = ("snapshot.keep=1", "snapshot.keep_best=false")
    assert train(*few)[0] == FINISHED
    digest = verified(tmp_path / "run", STEPS).digest
    (part,) = tmp_path.glob("run/snapshots/step-*/optimizer-*")
    raw = part.read_bytes()
    part.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    code, again = train(*few)
    assert (code, again.start) == (FINISHED, 0)
    assert verified(tmp_path / "run", STEPS).digest == digest


@pytest.mark.parametrize("kind", [StepDone, AttemptEnded])
def test_an_observer_that_fails_is_named_once_and_changes_nothing(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: type
) -> None:
    failing, recorder = Recorder(fails=kind), Recorder()
    code, run = train(observers=(failing, recorder))
    assert (code, run.lifetime.phase) == (FINISHED, Phase.OVER)
    assert capsys.readouterr().out.count("OBSERVER Recorder failed") == len(failing.of(kind)) == 1
    assert len(recorder.of(StepDone)) == STEPS
    assert recorder.events[-1] == AttemptEnded(STEPS, True, verified(tmp_path / "run", STEPS).digest)


def figures(train: Train, run_dir: Path, every: int, late: bool, stop: bool, last_step: int) -> list[Any]:
    """Of each step that an attempt does up to `last_step`. Each has its own speed, and is logged if it is due."""
    microbatch, now, recorder = 2.0, [0.0], Recorder()  # seconds

    def timed(run: Run) -> Run:
        def batches() -> Iterator[Any]:
            """Each takes its time. What is computed takes none. In one, the process is stopped."""
            for number, batch in enumerate(run.batches):
                now[0] += microbatch
                if number == 1:
                    now[0] += 60
                    run.lifetime.clock.pause(60)
                yield batch

        clock = partial(now.__getitem__, 0)
        run.lifetime.clock, run.lifetime.stop = Clock("step", clock), stop
        read = DelayedRead(run.context.update.guard.skips, late, clock, run.lifetime.clock.paused)
        return replace(run, batches=batches(), read=read)

    longer = (f"train.max_steps={last_step}", f"train.log_every={every}", "schedule.decay_steps=4")
    code, run = train(f"run.dir={run_dir}", *longer, observers=(recorder,), change=timed)
    assert code == (STOPPED if stop else FINISHED)
    seconds = microbatch * len(run.context.microbatches)
    done, speed = recorder.of(StepDone), run.context.plan.global_size * run.evaluation.config.model.block_size / seconds
    assert [(e.step, e.step_seconds, e.tokens_per_second) for e in done] == [
        (run.start + n + 1, seconds, speed) for n in range(len(done))
    ]
    assert [e.step for e in done if e.logged] == [e.step for e in done if e.step % every == 0 or e.step == last_step]
    return [(e.step, e.loss, e.grad_norm) for e in done]


@pytest.mark.parametrize("every", [1, 3])
def test_a_steps_figures_and_its_speed_are_its_own_whenever_they_are_read(
    train: Train, tmp_path: Path, every: int
) -> None:
    """On CUDA that is one step late, and right after the one before for the last step; in a resumed run, too."""
    now, late, now_stopped, late_stopped = (
        [f for last in (STEPS, STEPS + 3) for f in figures(train, tmp_path / f"{stop}{late}", every, late, stop, last)]
        for stop, late in product((False, True), repeat=2)
    )
    assert now == late
    assert late_stopped == late[:4]  # a request to stop takes a step longer
    assert now_stopped == late[:2]


def test_time_left_is_a_mean_over_the_last_steps() -> None:
    """After a slow beginning, it forgets that within a window."""
    pace = Pace(window=100)
    pace.mark(1, 8, 50.0)
    assert pace.of(8, 50.0) is None
    seconds = 50.0
    for step in range(10, 500, 10):
        seconds += 100.0 if step <= 100 else 10.0
        assert pace.of(8 * step, seconds) is not None
        pace.mark(step, 8 * step, seconds)
    assert pace.of(8 * 490, seconds) == 10.0 / 80
    assert len(pace.marks) == 11


def test_other_validation_data_are_said_and_the_best_loss_begins_anew(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config of an earlier version does not have the key, and that version took the whole split."""
    _, first = train("train.eval_batches=0")
    source, config, begun = first.evaluation.source, first.evaluation.config, list[float]()
    total = len(source.validation)
    assert total > 1

    def note(run: Run) -> Run:
        begun.append(run.evaluation.best_val_loss)
        return run

    for steps, batches in ((STEPS + 1, total), (STEPS + 2, 1)):
        longer = (f"train.max_steps={steps}", "schedule.decay_steps=4")
        _, second = train(f"train.eval_batches={batches}", *longer, change=note)
        assert math.isinf(begun[-1]) == ("train.eval_batches: " in capsys.readouterr().out) == (batches == 1)
    manifest = verified(tmp_path / "run", STEPS)
    samples = sampled_split(source.validation).size
    assert manifest.validated_on == (source.sha256, [samples, samples])
    assert "of other data" in other_validation(manifest, config, replace(source, sha256="0" * 64))
    for entry in manifest.history:  # of an earlier version
        del entry["validation"]
    for taken, known in ((0, True), (None, False)):
        manifest.config["train"]["eval_batches"] = taken
        assert (other_validation(manifest, config, source) == "") == known
    del manifest.config["train"]["eval_batches"]
    assert other_validation(manifest, config, source) == ""
    assert "train.eval_batches" in other_validation(manifest, second.evaluation.config, source)


def test_a_stop_of_one_process_is_heard_by_all_and_losses_are_added_along_the_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = list[Tensor]()

    def all_gather(received: Tensor, mine: Tensor, async_op: bool) -> Any:
        sent.append(mine)
        received.copy_(torch.cat([sent[0], sent[-1]]))
        return Mock()

    monkeypatch.setattr("mingpt.compute.stats.all_gather", all_gather)
    losses = [torch.tensor(x) for x in (1e8, 1.0, -1e8, 3.0, 1e-8)]
    for rank, mine in enumerate((losses[:2], losses[2:])):
        exchange = StatsExchange(World(rank, 2, rank, torch.device("cpu"), "gloo"), 5)
        tokens = [torch.tensor(1.0 if rank else 2.0**24)] * len(mine)
        exchange.start(mine, tokens, Flags(stop=rank == 1), (0.5, 0.25))
    found = exchange.finish()
    assert found.tokens.item() == 2**25 + 3  # in float32 it would be 2**25
    assert (found.flags.tolist(), found.times.tolist()) == ([1, 0, 0, 0, 0], [[0.5, 0.25]] * 2)
    a, b, c, d, e = (x.item() for x in losses)
    assert found.mean_loss() == ((a + b) + (c + (d + e))) / (2**25 + 3)


def test_a_run_that_was_rewound_meanwhile_is_not_written_to(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rewound(run: Run) -> Run:
        Attempt.claim(f"{tmp_path}/run", 0, None)
        return run

    assert train(change=rewound)[0] == USER_ERROR
    assert "attempt 2 has started" in capsys.readouterr().err
    assert store(tmp_path / "run").steps() == []


def test_on_cuda_the_device_tells_when_it_came_to_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host goes on at once, so its clock would say that a step takes no time."""
    queued, waited = [0.0], list[float]()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.reached = queued[0]  # milliseconds until the device has done all that it was given

        def elapsed_time(self, end: "Event") -> float:
            assert waited == [end.reached]
            return end.reached - self.reached

        def synchronize(self) -> None:
            waited.append(self.reached)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    device, began = torch.device("cuda"), Moment(torch.device("cuda"), lambda: 7.0, float)
    queued[0] += 250.0
    done = Moment(device, lambda: 7.0, lambda: 0.5)
    assert done.since(began) == 0.25
