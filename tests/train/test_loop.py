"""Loop, assembly and checkpointer in a world of one: snapshots in memory, observers that fail."""

import errno
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import fsspec
import pytest
import torch
from torch import Tensor

from mingpt.compose import compose
from mingpt.compute.stats import Flags, StatsExchange
from mingpt.config.schema import Config, WorldConfig
from mingpt.data.opening import open_data
from mingpt.data.source import Source, sampled_split
from mingpt.errors import FINISHED, STOPPED, UserError
from mingpt.observe.events import (
    AttemptEnded,
    Event,
    Observer,
    Observers,
    StepDone,
)
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from mingpt.tiers.checkpointer import Checkpointer
from mingpt.tiers.tiers import Tiers
from mingpt.train import loop, running, setup
from mingpt.train.claiming import Claimed, claim_attempt
from mingpt.train.factory import build, first_weights
from mingpt.train.figures import DelayedRead, Moment
from mingpt.train.loop import Run
from mingpt.train.origin import restore
from mingpt.train.own_model import FixedBuffers
from mingpt.train.reporter import Pace, Reporter
from mingpt.train.resume import other_validation
from mingpt.world.clock import Clock
from mingpt.world.joining import join
from mingpt.world.lifetime import Lifetime, Phase
from mingpt.world.world import World
from tests.kits.run_kit import TINY

STEPS = 4


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    threads = torch.get_num_threads()
    with join(WorldConfig(device="cpu")) as world:
        yield world
    torch.set_num_threads(threads)


@pytest.fixture
def place() -> Iterator[str]:
    """A run.dir in this process's memory."""
    name = uuid4().hex
    yield f"memory://{name}"
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{name}"):
        memory.rm(f"/{name}", recursive=True)


class Recorder:
    """fails: at which events."""

    def __init__(self, fails: type | tuple[()] = ()) -> None:
        self.events, self.calls, self.fails = list[Event](), 0, fails

    def on(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, self.fails):
            self.calls += 1
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@dataclass(frozen=True)
class Opened:
    """An attempt as assemble.train builds it, up to the loop."""

    run: Run
    config: Config
    source: Source
    lifetime: Lifetime
    best_val_loss: float

    def train(self) -> int:
        return loop.train(self.run)


OpenRun = Callable[..., Opened]


@pytest.fixture
def open_run(place: str, text: Path, cache: Path, world: World) -> OpenRun:
    def opened(*overrides: str, observers: tuple[Observer, ...] = (), late: bool = False) -> Opened:
        """late: the device is read one step late, as on CUDA."""
        length = (f"train.max_steps={STEPS}", f"schedule.decay_steps={STEPS}", "train.eval_every=2")
        places = (f"run.dir={place}", f"data.path={text}", f"data.cache_dir={cache}", "snapshot.every_steps=2")
        config = compose.configure([*TINY, *length, *places, *overrides])
        source = open_data(config.data, config.model.block_size, config.batch.micro_size)
        model, lifetime, watching = build(config, source.vocabulary.size), Lifetime(), Observers(observers, print)
        lifetime.clock, lifetime.phase = Clock("step"), Phase.JOINED
        setup.place_model(config, source, model, world)
        context = setup.context_of(config, source, model, world)
        tiers = Tiers(config, world, 0, print)
        origin = restore(config, source, context, tiers, lifetime.clock, first_weights)
        record = claim_attempt(config, source, origin, tiers, world)
        reporter = Reporter(config, watching, context, lifetime, origin.step, record.attempt)
        checkpointer = Checkpointer(config, tiers, record, reporter)
        buffers = FixedBuffers(model, config.model, world)
        attempt = Claimed(config, source, context, tiers, origin, record, lifetime)
        run = running.run_of(attempt, checkpointer, reporter, buffers)
        run = replace(run, read=DelayedRead(context.update.guard.skips, late))
        return Opened(run, config, source, lifetime, origin.best_val_loss)

    return opened


def digest_at(run: Opened, step: int) -> str:
    return read(Store(run.config.snapshot.dir), step).manifest.digest


def test_weights_of_a_damaged_snapshot_are_not_kept_if_no_other_is_left(open_run: OpenRun, place: str) -> None:
    """Its weights are good and read first; then comes the damaged part."""
    first = open_run("snapshot.keep=1", "snapshot.keep_best=false")
    assert first.train() == FINISHED
    digest, memory = digest_at(first, STEPS), fsspec.filesystem("memory")
    (part,) = memory.glob(f"{place.removeprefix('memory:/')}/snapshots/step-*/optimizer-*")
    raw = memory.cat_file(part)
    memory.pipe_file(part, raw[:-1] + bytes([raw[-1] ^ 1]))
    again = open_run("snapshot.keep=1", "snapshot.keep_best=false")
    assert again.run.start == 0
    new = build(again.config, again.source.vocabulary.size).state_dict()
    assert all(torch.equal(value, new[name]) for name, value in again.run.context.model.state_dict().items())
    assert again.train() == FINISHED
    assert digest_at(again, STEPS) == digest


@pytest.mark.parametrize("kind", [StepDone, AttemptEnded])
def test_an_observer_that_fails_is_named_once_and_changes_nothing(
    open_run: OpenRun, capsys: pytest.CaptureFixture[str], kind: type
) -> None:
    failing, recorder = Recorder(fails=kind), Recorder()
    run = open_run(observers=(failing, recorder))
    assert run.train() == FINISHED
    assert run.lifetime.phase is Phase.OVER
    assert capsys.readouterr().out.count("OBSERVER Recorder failed") == failing.calls == 1
    assert len(recorder.of(StepDone)) == STEPS
    assert recorder.events[-1] == AttemptEnded(STEPS, True, digest_at(run, STEPS))


def test_a_device_that_is_read_one_step_late_shows_the_same_figures(open_run: OpenRun, place: str) -> None:
    """As on CUDA. The last step's figures come, too, and a request to stop takes a step longer."""
    figures = []
    for name, late, stop, end in (
        ("now", False, False, FINISHED),
        ("late", True, False, FINISHED),
        ("x", True, True, STOPPED),
    ):
        run = open_run(f"run.dir={place}/{name}", observers=(recorder := Recorder(),), late=late)
        run.lifetime.stop = stop
        assert run.train() == end
        figures.append([(e.step, e.loss, e.grad_norm) for e in recorder.of(StepDone)])
    assert figures[0] == figures[1]
    assert [[step for step, *_ in steps] for steps in figures[1:]] == [[1, 2, 3, 4], [1, 2]]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("stop", [False, True])
def test_the_speed_of_a_step_is_its_own_whenever_it_is_read(
    open_run: OpenRun, late: bool, every: int, stop: bool
) -> None:
    """Also that of the last step, which on CUDA is read right after the one before; in a resumed run, too."""
    microbatch = 2.0  # seconds
    for last_step in (STEPS, STEPS + 3):
        longer = (f"train.max_steps={last_step}", f"train.log_every={every}", "schedule.decay_steps=4")
        run, now = open_run(*longer, observers=(recorder := Recorder(),)), [0.0]

        def batches(run: Opened = run, now: list[float] = now) -> Iterator[Any]:
            """Each takes its time. What is computed takes none. In one, the process is stopped."""
            for number, batch in enumerate(run.run.batches):
                now[0] += microbatch
                if number == 1:
                    now[0] += 60
                    run.lifetime.clock.pause(60)
                yield batch

        clock = partial(now.__getitem__, 0)
        run.lifetime.clock, run.lifetime.stop = Clock("step", clock), stop
        skips = run.run.context.update.guard.skips
        read = DelayedRead(skips, late, clock, run.lifetime.clock.paused)
        train, context = run.config.train, run.run.context
        loop.train(replace(run.run, batches=batches(), read=read))
        seconds = microbatch * len(context.microbatches)
        done, speed = recorder.of(StepDone), context.plan.global_size * run.config.model.block_size / seconds
        assert [(e.step, e.step_seconds, e.tokens_per_second) for e in done] == [
            (run.run.start + n + 1, seconds, speed) for n in range(len(done))
        ]
        assert [e.step for e in done if e.logged] == [
            e.step for e in done if e.step % every == 0 or e.step == train.max_steps
        ]


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
    open_run: OpenRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config of an earlier version does not have the key, and that version took the whole split."""
    first = open_run("train.eval_batches=0")
    first.train()
    total = len(first.source.validation)
    assert total > 1
    longer = (f"train.max_steps={STEPS + 1}", "schedule.decay_steps=4")
    for setting, anew in ((f"train.eval_batches={total}", False), ("train.eval_batches=1", True)):
        second = open_run(setting, *longer)
        assert math.isinf(second.best_val_loss) == anew
        assert ("train.eval_batches: " in capsys.readouterr().out) == anew
    manifest = read(Store(first.config.run.dir + "/snapshots"), STEPS).manifest
    samples = sampled_split(first.source.validation).size
    assert manifest.validated_on == (first.source.sha256, [samples, samples])
    other_data = replace(first.source, sha256="0" * 64)
    assert "of other data" in other_validation(manifest, first.config, other_data)
    for entry in manifest.history:  # of an earlier version
        del entry["validation"]
    for batches, known in ((0, True), (None, False)):
        manifest.config["train"]["eval_batches"] = batches
        assert (other_validation(manifest, first.config, first.source) == "") == known
    del manifest.config["train"]["eval_batches"]
    assert other_validation(manifest, first.config, first.source) == ""
    assert "train.eval_batches" in other_validation(manifest, second.config, first.source)


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


def test_a_run_that_was_rewound_meanwhile_is_not_written_to(open_run: OpenRun) -> None:
    older = open_run()
    open_run()
    with pytest.raises(UserError, match="attempt 2 has started"):
        older.train()
    assert Store(older.config.snapshot.dir).steps() == []


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
