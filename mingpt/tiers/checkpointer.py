"""Decides when to take a snapshot, and in which tier: durable at snapshot.dir, hot in each node's shared memory."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from mingpt.compute.stats import Flags
from mingpt.config.schema import Config
from mingpt.errors import SnapshotFailed, TransientError, UserError
from mingpt.files.storage import limit_seconds
from mingpt.snapshot.attempts import RunRecord
from mingpt.snapshot.format import Metrics, SharedState
from mingpt.snapshot.lineage import HotBase
from mingpt.snapshot.restore import Restored
from mingpt.snapshot.retention import Retention
from mingpt.snapshot.writer import SnapshotWriter
from mingpt.tiers import hot
from mingpt.tiers.tiers import Tiers
from mingpt.world import network
from mingpt.world.world import World

Content = tuple[SharedState, Metrics]
HOT_SECONDS = 5  # the least time to wait for the hot snapshot in flight
SPARE_SECONDS = 60  # a wait for other processes is longer by this than anything that they may be waiting for


class Listener(Protocol):
    """Hears what becomes of snapshots: in rank 0, in a writer's thread."""

    def committed(self, step: int, digest: str, seconds: float) -> None:
        """A durable snapshot is complete. seconds: how long it took."""

    def committed_hot(self, step: int) -> None:
        """A snapshot in memory is complete."""

    def lost(self, step: int, in_a_row: int, reason: str) -> None:
        """A durable snapshot could not be stored. in_a_row: how many in a row."""


class Checkpointer:
    """Writes the snapshots of one attempt. All processes decide alike, from flags that travel with every step's
    statistics."""

    durable_writer: SnapshotWriter
    # None: this node keeps no hot snapshots.
    hot_writer: SnapshotWriter | None

    def __init__(
        self,
        config: Config,
        tiers: Tiers,
        record: RunRecord,
        listener: Listener,
        notice_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Called by all processes, after the state was restored and the attempt was claimed.

        record: what a snapshot stores beside the state. notice_seconds: what a cloud's notice leaves from now on; 0:
        there is none.
        """
        self.settings = config.snapshot
        self.tiers = tiers
        self.store = tiers.store
        self.world = tiers.world
        self.log = tiers.log
        self.listener = listener
        self.notice_seconds = notice_seconds
        self.attempt = record.attempt
        self.stable_until = config.schedule.stable_until
        self.timeout = config.world.timeout_seconds
        self._sliced = config.shards and self.world.size > 1
        # When the last durable snapshot was started, for snapshot.every_seconds.
        self._last = time.monotonic()
        # Whether `close` leaves the hot snapshots: what they have is not durable.
        self._keep_hot = False
        # A process with nothing to write waits for one that may be waiting for the store. With equal limits the group
        # could time out in the moment in which that one reports.
        limit = self.timeout + limit_seconds() + SPARE_SECONDS
        # All processes make the groups, in this order, whether or not they will use them: making one is collective.
        all_processes = self.world.side_group(limit)
        on_node = self.world.node_group(hot.node_identity(self.settings.hot_dir), limit)
        # Those limits are long, for processes that are alive. A machine that is gone is detected by its TCP silence.
        network.limit_silence(None, self.timeout)
        self.durable_writer = self._make_durable_writer(record, all_processes, limit)
        self.hot_writer = self._make_hot_writer(record, on_node, limit)

    def _make_durable_writer(self, record: RunRecord, all_processes: World, limit: float) -> SnapshotWriter:
        s = self.settings
        return SnapshotWriter(
            self.store,
            all_processes,
            Retention(s.keep, s.keep_every, s.keep_best, s.orphan_age_seconds, self.stable_until),
            record.provenance,
            log=self.log,
            committed=self._durable_committed,
            lost=self.listener.lost,
            claim=record.claim,
            retry_seconds=s.retry_seconds,
            verify=s.verify_after_write,
            limit_seconds=self.timeout,
            hang_seconds=limit,
            max_failures=s.max_failures,
            writers=self.tiers.home.snapshots,
        )

    def _make_hot_writer(self, record: RunRecord, on_node: World, limit: float) -> SnapshotWriter | None:
        """Make the one of this node; None without. Called by all processes."""
        store, base = self.tiers.hot_store, self.tiers.base
        # The hot tier needs all processes of the node; with slices of the state, those of all nodes.
        needed = self.world if self._sliced else on_node
        missing = needed.gather(store is not None).count(False)
        if store is None:
            return None
        if missing:
            if self._sliced and self.world.local_rank == 0:
                self.log("no hot snapshots: another node can't keep them, and each node needs the slices of all")
            return None
        # Before the first hot snapshot of this attempt: one without a note of what it continues counts for nothing.
        damaged = [step for step in base.damaged if step > base.step]
        self._note_base(max(damaged, default=base.step), None if damaged else base.digest)
        return SnapshotWriter(
            store,
            on_node,
            Retention(hot.KEEP, keep_best=False),
            record.provenance,
            self.log,
            committed=self._hot_committed,
            limit_seconds=self.timeout,
            hang_seconds=limit,
            max_failures=self.settings.max_failures,
            everyone=self.world.side_group(limit) if self._sliced else None,
        )

    def _durable_committed(self, step: int, digest: str, seconds: float) -> None:
        self._note_base(step, digest)
        self.tiers.note_step(step)
        if self.world.is_main:
            self.listener.committed(step, digest, seconds)

    def _hot_committed(self, step: int, digest: str, seconds: float) -> None:
        if self.world.is_main:  # a hot snapshot is committed on each node
            self.listener.committed_hot(step)

    def _note_base(self, step: int, digest: str | None) -> None:
        """Note which durable snapshot the next hot ones continue. If that fails, the last note still holds."""
        store = self.tiers.hot_store
        if store is not None and self.world.local_rank == 0:
            try:
                HotBase(self.attempt, step, digest).write(store)
            except (UserError, TransientError) as error:
                self.log(f"step {step}: its digest could not be noted beside the hot snapshots: {error}")

    def flags(self, stop: bool) -> Flags:
        """This process's flags. stop: whether it is asked to stop."""
        # Here, before the exchange, so that one process and many decide in the same way about a writer that hangs.
        for writer in (self.durable_writer, self.hot_writer):
            if writer is not None:
                writer.fail_if_it_hangs()
        every = self.settings.every_seconds
        return Flags(
            stop=stop,
            due=0 < every <= time.monotonic() - self._last,
            busy=self.durable_writer.busy,
            hot_busy=self.hot_writer is not None and (self.hot_writer.busy or self.hot_writer.gave_up),
            gave_up=self.durable_writer.gave_up,
        )

    def before_update(self) -> None:
        """Call before the state changes: a copy from the device may still be under way."""
        for writer in (self.durable_writer, self.hot_writer):
            if writer is not None:
                writer.before_update()

    def is_due(self, step: int, flags: Flags, best: bool) -> bool:
        """Whether `after_step` may take a snapshot on some node. Equal in all processes.

        flags: those of all processes. best: this step's evaluation is the best so far. Raises why snapshots fail, if a
        process can't write any more.
        """
        if flags.gave_up:
            raise self.durable_writer.problem(SPARE_SECONDS)
        return self._durable_is_due(step, flags, best) or self._hot_is_due(step)

    def _durable_is_due(self, step: int, flags: Flags, best: bool) -> bool:
        return self._by_steps(step) or flags.due or self._must(step, best)

    def _by_steps(self, step: int) -> bool:
        return self.settings.every_steps > 0 and step % self.settings.every_steps == 0

    def _hot_is_due(self, step: int) -> bool:
        return self.settings.hot_every_steps > 0 and step % self.settings.hot_every_steps == 0

    def _must(self, step: int, best: bool) -> bool:
        """Whether no later snapshot can stand for this one: the best model, or where the run can be extended from."""
        return (best and self.settings.keep_best) or step == self.stable_until

    def after_step(self, step: int, content: Callable[[], Content], flags: Flags, best: bool) -> None:
        """Start the snapshots that are due after this step. One still in flight means that this step's is left out.

        Waits for the one in flight only if this step must be stored, and for the new one only with
        snapshot.asynchronous=false. content: waits for the device. flags, best: as in `is_due`.
        """
        # On CUDA the flags are read one step late, so they miss a snapshot that the last step has started.
        late = self.world.device.type == "cuda"
        if self._durable_is_due(step, flags, best):
            started = late and self.settings.asynchronous and self.durable_writer.step == step - 1
            if self._must(step, best):
                self.durable_writer.wait_until_idle()
                self._start_durable(step, content())
            elif not (flags.busy or started):
                self._start_durable(step, content())
            elif self._by_steps(step) and self.world.is_main:
                in_flight = self.durable_writer.step
                self.log(f"step {step}: no snapshot, that of step {in_flight} is still being written")
        # Not "else": a step may be due in both tiers, and the durable one may have been left out.
        if self.hot_writer and self._hot_is_due(step):
            started = late and self.hot_writer.step == step - 1
            if not (flags.hot_busy or started):
                self.hot_writer.start(step, *content())

    def _start_durable(self, step: int, content: Content) -> None:
        self.durable_writer.start(step, *content)
        if not self.settings.asynchronous:
            self.durable_writer.wait_until_idle()
        self._last = time.monotonic()

    def last(self, step: int, content: Content, stopping: bool) -> str | None:
        """Save the last step of an attempt and wait. Returns its digest, or None if it is not durable in time.

        Time is limited by snapshot.grace_seconds or a cloud's notice, and only when the attempt was asked to stop. Then
        the hot snapshot is started first, since that is fast.
        """
        limits = list[float]()
        if stopping:
            # A cloud's notice comes to one machine, but a snapshot needs all: the shortest time holds for all.
            limits = [self.settings.grace_seconds, *self.world.gather(self.notice_seconds())]
        grace = min(filter(None, limits), default=0)
        if not grace:
            return self.durable_writer.save(step, *content)
        deadline = time.monotonic() + grace
        in_memory = self._start_hot(step, content, deadline)
        own = grace == self.settings.grace_seconds
        limit = f"snapshot.grace_seconds={grace:g}" if own else f"the {grace:g} s that a cloud's notice leaves"
        digest, why = None, f"the snapshot did not reach {self.store.url} within {limit}"
        try:
            self.durable_writer.wait_until_idle(deadline - time.monotonic())
            self.durable_writer.start(step, *content, log_failure=False)
            digest = self.durable_writer.wait(deadline - time.monotonic())
        except SnapshotFailed as error:
            why = str(error)
        except TimeoutError:
            pass  # `why` says it
        finally:  # also if the store raises: the step must stay in this node's memory
            in_memory = in_memory and self._wait_for_hot()
        # Each process has its own deadline. If one of them has seen the commit, the snapshot is durable for all.
        digest = next((known for known in self.world.gather(digest) if known), None)
        if digest is None:
            self._keep_hot = True
            if self.world.is_main:
                elsewhere = f"the newest step in {self.store.url}"
                there = f"step {step} on these nodes (in their memory), and from {elsewhere} elsewhere"
                self.log(f"step {step}: {why}: the next attempt starts from {there if in_memory else elsewhere}")
        return digest

    def _start_hot(self, step: int, content: Content, deadline: float) -> bool:
        """Whether it was started. An error is logged and no more: the durable snapshot comes next."""
        writer = self.hot_writer
        ready = writer is not None and not writer.broken
        try:
            if writer and ready:
                writer.wait_until_idle(max(deadline - time.monotonic(), HOT_SECONDS))
            ready = all(self.world.gather(ready)) if self._sliced else ready
            if writer and ready:
                writer.start(step, *content)
        except Exception as error:
            self.log(f"step {step}: no hot snapshot: {str(error) or type(error).__name__}")
            return False
        return ready

    def _wait_for_hot(self) -> bool:
        assert self.hot_writer
        try:
            self.hot_writer.wait(SPARE_SECONDS)  # long, since another process may have started late
        except Exception:  # the writer has logged it, or it was too late
            return False
        return True

    def make_durable(self, loaded: Restored, state: SharedState) -> str:
        """Save the run's last step, which only a node's memory has, in the durable store. Returns its digest.

        Called by all processes, at the end: it also removes the hot snapshots.
        """
        digest = self.durable_writer.save(loaded.manifest.step, state, loaded.manifest.metrics)
        self.close()
        return digest

    def keep(self) -> int:
        """Before an end without a snapshot: wait for the one in flight, and keep the hot ones.

        Returns the newest durable step, 0 if there is none. Called by all processes.
        """
        # It may be the good one that the run goes back to. If it takes too long, an older one is as good.
        with suppress(TimeoutError):
            self.durable_writer.wait_until_idle(self.timeout)
        self._keep_hot = True
        return int(self.world.run_on_main(lambda: max(self.store.steps(), default=0)))

    def close(self) -> None:
        """Remove the hot snapshots if the attempt's last step is durable. Called by all processes, at the end."""
        if self.hot_writer:
            with suppress(TimeoutError):
                self.hot_writer.wait_until_idle(SPARE_SECONDS)
        # A process that is still writing its share of a hot snapshot would find its folder gone.
        self.world.barrier()
        if self.hot_writer and not self._keep_hot and self.hot_writer.world.is_main:
            hot.remove(self.hot_writer.store)
