"""When a snapshot is taken, and in which tier: durable ones at snapshot.dir, hot ones in each node's shared memory."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from mingpt.config.schema import Config
from mingpt.errors import Damaged, SnapshotFailed, Unreadable, UserError
from mingpt.snapshot import attempts, hot
from mingpt.snapshot.attempts import RunRecord
from mingpt.snapshot.format import Metrics, State
from mingpt.snapshot.lineage import Follows, Newest, set_overtaken_aside, strangers
from mingpt.snapshot.reader import Loaded, verify
from mingpt.snapshot.restore import restore
from mingpt.snapshot.retention import Retention
from mingpt.snapshot.store import Store
from mingpt.snapshot.writer import SnapshotWriter
from mingpt.storage import limit_seconds
from mingpt.world import network
from mingpt.world.world import World

Content = tuple[State, Metrics]
FLAGS = DUE, BUSY, HOT_BUSY, BROKEN = range(4)  # what the processes tell each other with every step
HOT_SECONDS = 5  # for the hot snapshot in flight, however little time there is: memory is fast
SPARE_SECONDS = 60  # by which a wait for the other processes is longer than anything that those may be doing


def newest(config: Config) -> int:
    """The step of the newest snapshot that this node can go on from, of either tier; 0 if there is none."""
    durable = Store(config.snapshot.dir)
    memory = hot.find_hot(config.snapshot.hot_dir, config.run.dir) if config.snapshot.hot_every_steps else None
    steps = durable.steps()
    if memory is not None:
        gone = strangers(memory, Newest.of(durable, attempts.records(config.run.dir)))
        steps += [step for step in memory.steps() if step not in gone]
    return max(steps, default=0)


class Checkpointer:
    """Both tiers of a run. Every decision is made alike in all processes, from what travels with the step."""

    def __init__(self, config: Config, world: World, state_bytes: int, say: Callable[[str], None]) -> None:
        """Raises UserError if snapshot.dir can't be used. Without room for it, it does without the hot tier."""
        self.settings, self.world, self.say = config.snapshot, world, say
        self.run_dir, self.timeout = config.run.dir, config.world.timeout_seconds
        self.store = Store(config.snapshot.dir)
        self.hot_store: Store | None = None
        self.hot: SnapshotWriter | None = None
        if config.snapshot.hot_every_steps:
            identity = world.run_on_main(lambda: hot.run_id(config.run.dir))
            try:
                self.hot_store = hot.open_hot(config.snapshot.hot_dir, config.run.dir, identity, state_bytes)
            except UserError as mistake:
                if world.local_rank == 0:
                    say(f"no hot snapshots on this node: {mistake}")
        self._last = time.monotonic()
        self._too_late = False

    def restore(self) -> Loaded | None:
        def look() -> dict[str, Any]:
            records = attempts.records(self.run_dir)
            set_overtaken_aside(self.store, records, self.say)
            return asdict(Newest.of(self.store, records))

        self.base = Newest(**self.world.run_on_main(look))
        return restore(self.store, self.hot_store, self.world, self.say, self.base)

    def begin(self, record: RunRecord, committed: Callable[[int, str, float], None]) -> None:
        """Make the writers. Called by all processes, after `restore`.

        committed: called in rank 0 after each durable commit with step, digest and seconds, in the writer's thread.
        """
        self.attempt, provenance = record.attempt, record.provenance
        # A process that has nothing to write waits for one that may be waiting for the store: the limits must not tie,
        # or the group breaks in the moment in which the other one reports.
        limit = self.timeout + limit_seconds() + SPARE_SECONDS
        beside = self.world.side_group(limit)
        on_node = self.world.node_group(hot.node_identity(self.settings.hot_dir), limit)
        # That may take long where the others live; a machine that is gone answers nothing, and is known by that.
        network.limit_silence(None, self.timeout)
        s = self.settings
        retention = Retention(s.keep, s.keep_every, s.keep_best, s.orphan_age_seconds)

        def durable_committed(step: int, digest: str, seconds: float) -> None:
            self._note(step, digest)
            if self.world.is_main:
                committed(step, digest, seconds)

        self.durable = SnapshotWriter(
            self.store,
            beside,
            retention,
            provenance,
            self.say,
            durable_committed,
            record.claim,
            s.retry_seconds,
            s.verify_after_write,
            self.timeout,
        )
        # A node on which one process has no room has no hot tier.
        everywhere = all(on_node.gather(self.hot_store is not None))
        if self.hot_store is not None and everywhere:
            # Before the first hot snapshot of this attempt: what it will continue.
            unreadable = [step for step in self.base.unreadable if step > self.base.step]
            self._note(max(unreadable, default=self.base.step), None if unreadable else self.base.digest)
            self.hot = SnapshotWriter(
                self.hot_store, on_node, Retention(hot.KEEP, keep_best=False), provenance, self.say,
                limit_seconds=self.timeout,
            )  # fmt: skip

    def _note(self, step: int, digest: str | None) -> None:
        """What the hot snapshots from here on continue. If it can't be written, the last note still holds."""
        if self.hot_store is not None and self.world.local_rank == 0:
            try:
                Follows(self.attempt, step, digest).write(self.hot_store)
            except (UserError, OSError) as error:
                self.say(f"step {step}: not noted beside the hot snapshots: {error}")

    def flags(self) -> Sequence[bool]:
        """This process's part of what travels with the step."""
        every, most = self.settings.every_seconds, self.settings.max_failures
        return (
            0 < every <= time.monotonic() - self._last,
            self.durable.busy,
            self.hot is not None and (self.hot.busy or self.hot.broken or self.hot.failures >= most),
            self.durable.failures >= most or self.durable.broken,
        )

    def before_update(self) -> None:
        """Call before the state changes."""
        for writer in (self.durable, self.hot):
            if writer is not None:
                writer.before_update()

    def is_due(self, step: int, flags: Sequence[float]) -> bool:
        """Whether `after_step` may take a snapshot on some node: equal in all processes.

        Raises what is wrong with those that were taken before.
        """
        if flags[BROKEN] > 0:
            raise self.durable.problem(SPARE_SECONDS)
        every, hot_every = self.settings.every_steps, self.settings.hot_every_steps
        return (every > 0 and step % every == 0) or flags[DUE] > 0 or (hot_every > 0 and step % hot_every == 0)

    def after_step(self, step: int, content: Callable[[], Content], flags: Sequence[float], best: bool) -> None:
        """Start what is due after this step; waits for nothing but the snapshot before one that is to be kept.

        flags: for each, how many processes have raised it. best: the step's evaluation is the best so far.
        """
        # On CUDA the flags are those of the step before, which can't know of a snapshot started after that.
        late = self.world.device.type == "cuda"
        by_steps = self.settings.every_steps > 0 and step % self.settings.every_steps == 0
        best = best and self.settings.keep_best
        if by_steps or best or flags[DUE] > 0:
            if best:  # it comes once
                self.durable.settle()
            busy = not best and (flags[BUSY] > 0 or (late and self.durable.step == step - 1))
            if not busy:
                self.durable.start(step, *content())
                if not self.settings.asynchronous:
                    self.durable.settle()
            elif by_steps and self.world.is_main:
                self.say(f"step {step}: no snapshot, that of step {self.durable.step} is still being written")
            if self.durable.step == step:
                self._last = time.monotonic()
        if self.hot and step % self.settings.hot_every_steps == 0:
            busy = flags[HOT_BUSY] > 0 or (late and self.hot.step == step - 1)
            if not busy:
                self.hot.start(step, *content())

    def last(self, step: int, content: Content, stopping: bool) -> str | None:
        """The snapshot at the end of an attempt, waited for; its digest, or None if it is not durable.

        When a stop has a limit (snapshot.grace_seconds), the hot tier comes first, and the durable one may be too late.
        """
        grace = self.settings.grace_seconds
        if not (stopping and grace):
            return self.durable.save(step, *content)
        deadline = time.monotonic() + grace
        in_memory = self._start_hot(step, content, deadline)
        digest, why = None, f"the snapshot did not reach {self.store.url} within snapshot.grace_seconds={grace:g}"
        try:
            self.durable.settle(deadline - time.monotonic())
            self.durable.start(step, *content, shout=False)
            digest = self.durable.wait(deadline - time.monotonic())
        except SnapshotFailed as error:
            why = str(error)
        except TimeoutError:
            pass
        finally:  # whatever is wrong with the store, the step stays in this node's memory
            in_memory = in_memory and self._wait_for_hot()
        # Each process has its own clock. What one of them knows to be committed is, and all must go the same way.
        digest = next((known for known in self.world.gather(digest) if known), None)
        if digest is None:
            self._too_late = True
            if self.world.is_main:
                elsewhere = f"the newest step in {self.store.url}"
                there = f"step {step} on these nodes (in their memory), and from {elsewhere} elsewhere"
                self.say(f"step {step}: {why}: the next attempt starts from {there if in_memory else elsewhere}")
        return digest

    def _start_hot(self, step: int, content: Content, deadline: float) -> bool:
        """Whatever goes wrong with the memory, the durable snapshot comes next."""
        if self.hot is None or self.hot.broken:
            return False
        try:
            self.hot.settle(max(deadline - time.monotonic(), HOT_SECONDS))
            self.hot.start(step, *content)
        except Exception as error:
            self.say(f"step {step}: no hot snapshot: {str(error) or type(error).__name__}")
            return False
        return True

    def _wait_for_hot(self) -> bool:
        assert self.hot
        try:
            self.hot.wait(SPARE_SECONDS)  # memory is fast; another process may have had no time to start
        except Exception:  # said by its writer, or too late
            return False
        return True

    def make_durable(self, loaded: Loaded) -> str:
        """Store the run's last step, which only the memory of a node has; returns its digest. Called by all processes.

        Then the memory is tidied up: there is nothing left to do.
        """
        digest = self.durable.save(loaded.manifest.step, loaded.state, loaded.manifest.metrics)
        self.close()
        return digest

    def is_durable(self, loaded: Loaded) -> bool:
        """Whether what was restored is durable, and not only in memory. Called by all processes."""

        def look() -> bool:
            if loaded.url == self.store.url:
                return True
            if (self.base.step, self.base.digest) != (loaded.manifest.step, loaded.manifest.digest):
                return False
            try:
                verify(self.store, loaded.manifest.step)  # the memory is the only copy if this one is damaged
            except (Damaged, Unreadable):
                return False
            return True

        return bool(self.world.run_on_main(look))

    def keep(self) -> int:
        """Before an end without a snapshot: let the one that is in flight arrive, and leave what is in memory.

        Returns the newest durable step, 0 if there is none. Called by all processes.
        """
        with suppress(TimeoutError):
            self.durable.settle(self.timeout)
        self._too_late = True
        return int(self.world.run_on_main(lambda: max(self.store.steps(), default=0)))

    def forget_hot(self) -> None:
        """When the run's last step is durable: remove what an attempt left that was killed after it."""
        if self.hot_store and self.world.local_rank == 0:
            hot.remove(self.hot_store)

    def close(self) -> None:
        """Called by all processes at the end of an attempt: if its last step is durable, the hot ones have served."""
        if self.hot:
            with suppress(TimeoutError):
                self.hot.settle(SPARE_SECONDS)
        self.world.barrier()
        if self.hot and not self._too_late and self.hot.world.is_main:
            hot.remove(self.hot.store)
