"""When a snapshot is taken, and in which tier: durable ones at snapshot.dir, hot ones in each node's shared memory."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mingpt.config import Config
from mingpt.distributed import World
from mingpt.errors import Mistake
from mingpt.snapshot import hot
from mingpt.snapshot.format import Metrics, State
from mingpt.snapshot.reader import Loaded
from mingpt.snapshot.restore import restore
from mingpt.snapshot.retention import Retention
from mingpt.snapshot.store import Store
from mingpt.snapshot.writer import SnapshotFailed, SnapshotWriter

Content = tuple[State, Metrics]
FLAGS = DUE, BUSY, HOT_BUSY, BROKEN = range(4)  # what the processes tell each other with every step


def newest(config: Config) -> int:
    """The step of the newest snapshot that this node can see, of either tier; 0 if there is none."""
    steps = Store(config.snapshot.dir).steps()
    identity = hot.find_run_id(config.run.dir) if config.snapshot.hot_every_steps else None
    if identity is not None:
        steps += Store(str(hot.folder(config.snapshot.hot_dir, config.run.name, identity))).steps()
    return max(steps, default=0)


class Snapshots:
    """Both tiers of a run. Every decision is made alike in all processes, from what travels with the step."""

    def __init__(self, config: Config, world: World, state_bytes: int, say: Callable[[str], None]) -> None:
        """Raises Mistake if snapshot.dir can't be used. Without room for the hot tier, it says so and does without."""
        self.settings, self.world, self.say = config.snapshot, world, say
        self.limit_seconds = config.world.timeout_seconds
        self.store = Store(config.snapshot.dir)
        self.hot_store: Store | None = None
        if config.snapshot.hot_every_steps:
            identity = world.ask_speaker(lambda: hot.run_id(config.run.dir))
            try:
                self.hot_store = hot.open_hot(config.snapshot.hot_dir, config.run.name, identity, state_bytes)
            except Mistake as mistake:
                if world.local_rank == 0:
                    say(f"no hot snapshots on this node: {mistake}")
        self._last = time.monotonic()
        self._too_late = False

    def restore(self) -> Loaded | None:
        return restore(self.store, self.hot_store, self.world, self.say)

    def begin(
        self,
        provenance: Mapping[str, Any],
        check: Callable[[], None],
        committed: Callable[[int, str, float], None],
    ) -> None:
        """Make the writers, with what they call before and after a durable commit. Called by all processes."""
        beside = self.world.beside(self.limit_seconds)
        on_node = self.world.on_node(hot.node_identity(self.settings.hot_dir), self.limit_seconds)
        s = self.settings
        retention = Retention(s.keep, s.keep_every, s.keep_best, s.orphan_age_seconds)
        self.durable = SnapshotWriter(
            self.store, beside, retention, provenance, self.say, committed, check, s.retry_seconds, s.verify_after_write
        )
        # A node on which one process has no room has no hot tier.
        everywhere = all(on_node.gather(self.hot_store is not None))
        self.hot: SnapshotWriter | None = None
        if self.hot_store is not None and everywhere:
            self.hot = SnapshotWriter(
                self.hot_store, on_node, Retention(hot.KEEP, keep_best=False), provenance, self.say
            )

    def flags(self) -> Sequence[bool]:
        """This process's part of what travels with the step."""
        every, most = self.settings.every_seconds, self.settings.max_failures
        return (
            0 < every <= time.monotonic() - self._last,
            self.durable.busy,
            self.hot is not None and (self.hot.busy or self.hot.failures >= most),
            self.durable.failures >= most or self.durable.superseded,
        )

    def before_update(self) -> None:
        """Call before the state changes."""
        for writer in (self.durable, self.hot):
            if writer is not None:
                writer.before_update()

    def after_step(self, step: int, content: Callable[[], Content], flags: Sequence[float], late: bool) -> None:
        """Start what is due after this step; never waits. flags: for each, how many processes have raised it.

        late: the flags are those of the step before, which can't know of a snapshot started after that.
        """
        if flags[BROKEN] > 0:
            self.durable.wait()  # raises what went wrong with the last one
        by_steps = self.settings.every_steps > 0 and step % self.settings.every_steps == 0
        if by_steps or flags[DUE] > 0:
            busy = flags[BUSY] > 0 or (late and self.durable.step == step - 1)
            if not busy:
                self.durable.start(step, *content())
                if not self.settings.asynchronous:
                    self.durable.settle()
            elif by_steps and self.world.speaks:
                self.say(f"step {step}: no snapshot, that of step {self.durable.step} is still being written")
            if self.durable.step == step:
                self._last = time.monotonic()
        if self.hot and step % self.settings.hot_every_steps == 0:
            busy = flags[HOT_BUSY] > 0 or (late and self.hot.step == step - 1)
            if not busy:
                self.hot.start(step, *content())

    def last(self, step: int, content: Content, stopping: bool) -> str:
        """The snapshot at the end of an attempt, waited for; returns its digest.

        When a stop has a limit (snapshot.grace_seconds), the hot tier comes first, and the durable one may be too late.
        """
        grace = self.settings.grace_seconds
        if not (stopping and grace):
            return self.durable.save(step, *content)
        deadline = time.monotonic() + grace
        hot_digest = self.hot.save(step, *content) if self.hot else None
        try:
            self.durable.settle(deadline - time.monotonic())
            self.durable.start(step, *content, shout=False)
            return self.durable.wait(deadline - time.monotonic())
        except SnapshotFailed as error:
            if hot_digest is None:
                raise
            self._too_late = True
            if self.world.speaks:
                self.say(
                    f"step {step}: {error}. The next attempt starts from step {step} on these nodes (in their memory), "
                    f"and from the newest step in {self.store.url} elsewhere"
                )
            return hot_digest
        except TimeoutError:
            self._too_late = True
            if self.world.speaks:
                here = f"step {step} on these nodes (in their memory), and from " if self.hot else ""
                there = max(self.store.steps(), default=0)
                self.say(
                    f"step {step}: the snapshot did not reach {self.store.url} within "
                    f"snapshot.grace_seconds={grace:g}: the next attempt starts from {here}step {there} elsewhere"
                )
            return hot_digest or "not saved"

    def forget_hot(self, step: int) -> None:
        """When a run has nothing left to do: remove what an attempt left that was killed after its last snapshot.

        step: the run's last one. If only the memory has it, it stays. Called by all processes.
        """
        is_durable = self.world.ask_speaker(lambda: step in self.store.steps())
        if is_durable and self.hot_store and self.world.local_rank == 0:
            hot.remove(self.hot_store)

    def close(self) -> None:
        """After the last durable snapshot, the hot ones have served."""
        if self.hot and not self._too_late:
            self.hot.settle()
            self.hot.world.barrier()
            if self.hot.world.speaks:
                hot.remove(self.hot.store)
