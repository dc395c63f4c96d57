"""Decides when to take a snapshot, and in which tier: durable at snapshot.dir, hot in each node's shared memory."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from mingpt.compute.stats import Flags
from mingpt.config.schema import Config
from mingpt.errors import Damaged, SnapshotFailed, TransientError, Unreadable, UserError
from mingpt.snapshot import attempts, hot
from mingpt.snapshot.attempts import RunRecord
from mingpt.snapshot.elsewhere import Marker, read_marker, remove_marker
from mingpt.snapshot.format import Metrics, SharedState
from mingpt.snapshot.home import Home
from mingpt.snapshot.lineage import HotBase, NewestDurable, set_overtaken_aside, stale_steps
from mingpt.snapshot.reader import verify
from mingpt.snapshot.restore import Restored, Take, restore
from mingpt.snapshot.retention import Retention
from mingpt.snapshot.store import Store
from mingpt.snapshot.writer import SnapshotWriter
from mingpt.storage import limit_seconds
from mingpt.world import network
from mingpt.world.world import World

Content = tuple[SharedState, Metrics]
HOT_SECONDS = 5  # the least time to wait for the hot snapshot in flight
SPARE_SECONDS = 60  # a wait for other processes is longer by this than anything that they may be waiting for


def newest(config: Config) -> int:
    """The newest step that this node can go on from, in either tier; 0 if there is none."""
    if marker := read_marker(config.run.dir):  # the run is on another node's disk
        own = hot.folder(config.snapshot.hot_dir, config.run.dir, marker.run)
        return max([marker.step, *(Store(str(own), "snapshot.hot_dir").steps() if own.is_dir() else ())])
    durable = Store(config.snapshot.dir)
    memory = hot.find_hot(config.snapshot.hot_dir, config.run.dir) if config.snapshot.hot_every_steps else None
    steps = durable.steps()
    if memory is not None:
        stale = stale_steps(memory, NewestDurable.of(durable, attempts.records(config.run.dir)))
        steps += [step for step in memory.steps() if step not in stale]
    return max(steps, default=0)


class Checkpointer:
    """Both tiers of a run. All processes decide alike, from flags that travel with every step's statistics."""

    def __init__(
        self,
        config: Config,
        world: World,
        state_bytes: int,
        log: Callable[[str], None],
        notice_seconds: Callable[[], float] = lambda: 0.0,
        home: Home | None = None,
    ) -> None:
        """notice_seconds: what a cloud's notice leaves from now on; 0: there is none. home: where the run lives.

        Raises UserError if snapshot.dir can't be used. A hot tier that can't be used is logged and left out.
        """
        self.settings, self.world, self.log, self.notice_seconds = config.snapshot, world, log, notice_seconds
        self.home = home or Home(range(world.size), range(world.size))
        self.run_dir, self.timeout = config.run.dir, config.world.timeout_seconds
        self.store = Store(config.snapshot.dir)
        self.hot_store: Store | None = None
        self.hot: SnapshotWriter | None = None
        if config.snapshot.hot_every_steps:
            identity = world.run_on_main(lambda: hot.run_id(config.run.dir))
            try:
                spare = hot.SPARE_BYTES if world.backend != "nccl" or world.size == 1 else hot.NCCL_BYTES
                self.hot_store = hot.open_hot(config.snapshot.hot_dir, config.run.dir, identity, state_bytes, spare)
            except UserError as error:
                if world.local_rank == 0:
                    log(f"no hot snapshots on this node: {error}")
        self.stable_until = config.schedule.stable_until
        self.sharded = config.shards and world.size > 1
        self._last = time.monotonic()
        self._keep_hot = False
        self._unmarked = False  # a marker could not be written

    def restore(self, take: Take) -> Restored | None:
        """Take over the newest good snapshot of either tier, as `restore`. Called by all processes."""

        def set_aside_and_find_base() -> dict[str, Any]:
            records = attempts.records(self.run_dir)
            set_overtaken_aside(self.store, records, self.log)
            return asdict(NewestDurable.of(self.store, records))

        self.base = NewestDurable(**self.world.run_on_main(set_aside_and_find_base))
        return restore(self.store, self.hot_store, self.world, self.log, self.base, take, self.home.snapshots)

    def _note_home(self) -> None:
        """Have each node know where the run is: those that have it, by no marker. Collective."""
        self.run_id = str(self.world.run_on_main(lambda: hot.run_id(self.run_dir))) if self.home.host else ""
        if self.world.local_rank == 0 and self.world.rank in self.home.run:
            remove_marker(self.run_dir)
        self._note_step(self.base.step)

    def _note_step(self, step: int) -> None:
        """Where run.dir is not seen, leave a marker; that node's launcher, too, learns from it that the run goes on."""
        if self._unmarked or self.world.local_rank or self.world.rank in self.home.run:
            return
        try:
            Marker(self.run_id, self.home.host, self.attempt, step).write(self.run_dir)
        except (UserError, TransientError) as error:
            self._unmarked = True  # said once
            self.log(f"on which node's disk this run lives could not be noted on this node: {error}")

    def begin(
        self,
        record: RunRecord,
        committed: Callable[[int, str, float], None],
        committed_hot: Callable[[int], None] = lambda step: None,
        lost: Callable[[int, int, str], None] = lambda step, in_a_row, reason: None,
    ) -> None:
        """Make the writers. Called by all processes, after `restore`.

        The callbacks are called in rank 0, in a writer's thread. committed(step, digest, seconds), committed_hot(step):
        after each durable or hot commit. lost(step, failures in a row, reason): a durable one could not be stored.
        """
        self.attempt, provenance = record.attempt, record.provenance
        self._note_home()
        # A process with nothing to write waits for one that may be waiting for the store. With equal limits the group
        # could time out in the moment in which that one reports.
        limit = self.timeout + limit_seconds() + SPARE_SECONDS
        all_processes = self.world.side_group(limit)
        on_node = self.world.node_group(hot.node_identity(self.settings.hot_dir), limit)
        # Those limits are long, for processes that are alive. A machine that is gone is detected by its TCP silence.
        network.limit_silence(None, self.timeout)
        s = self.settings

        def durable_committed(step: int, digest: str, seconds: float) -> None:
            self._note_base(step, digest)
            self._note_step(step)
            if self.world.is_main:
                committed(step, digest, seconds)

        def hot_committed(step: int, digest: str, seconds: float) -> None:
            if self.world.is_main:
                committed_hot(step)

        self.durable = SnapshotWriter(
            self.store,
            all_processes,
            Retention(s.keep, s.keep_every, s.keep_best, s.orphan_age_seconds, self.stable_until),
            provenance,
            log=self.log,
            committed=durable_committed,
            lost=lost,
            claim=record.claim,
            retry_seconds=s.retry_seconds,
            verify=s.verify_after_write,
            limit_seconds=self.timeout,
            hang_seconds=limit,
            max_failures=s.max_failures,
            writers=self.home.snapshots,
        )
        # The hot tier needs all processes of the node; with slices of the state, those of all nodes.
        needed = self.world if self.sharded else on_node
        missing = needed.gather(self.hot_store is not None).count(False)
        if missing and self.sharded and self.hot_store is not None and self.world.local_rank == 0:
            self.log("no hot snapshots: another node can't keep them, and each node needs the slices of all")
        if self.hot_store is not None and not missing:
            # Before the first hot snapshot of this attempt.
            unreadable = [step for step in self.base.unreadable if step > self.base.step]
            self._note_base(max(unreadable, default=self.base.step), None if unreadable else self.base.digest)
            self.hot = SnapshotWriter(
                self.hot_store, on_node, Retention(hot.KEEP, keep_best=False), provenance, self.log,
                committed=hot_committed, limit_seconds=self.timeout, hang_seconds=limit, max_failures=s.max_failures,
                everyone=self.world.side_group(limit) if self.sharded else None,
            )  # fmt: skip

    def _note_base(self, step: int, digest: str | None) -> None:
        """Note which durable snapshot the next hot ones continue. If that fails, the last note still holds."""
        if self.hot_store is not None and self.world.local_rank == 0:
            try:
                HotBase(self.attempt, step, digest).write(self.hot_store)
            except (UserError, TransientError) as error:
                self.log(f"step {step}: its digest could not be noted beside the hot snapshots: {error}")

    def flags(self, stop: bool) -> Flags:
        """This process's flags. stop: whether it is asked to stop."""
        for writer in (self.durable, self.hot):
            if writer is not None:
                writer.fail_if_it_hangs()  # here, so that one process and many decide it in the same way
        every = self.settings.every_seconds
        return Flags(
            stop=stop,
            due=0 < every <= time.monotonic() - self._last,
            busy=self.durable.busy,
            hot_busy=self.hot is not None and (self.hot.busy or self.hot.gave_up),
            broken=self.durable.gave_up,
        )

    def before_update(self) -> None:
        """Call before the state changes: a copy from the device may still be under way."""
        for writer in (self.durable, self.hot):
            if writer is not None:
                writer.before_update()

    def is_due(self, step: int, flags: Flags) -> bool:
        """Whether `after_step` may take a snapshot on some node. Equal in all processes.

        flags: those of all processes. Raises why snapshots fail, if a process can't write any more.
        """
        if flags.broken:
            raise self.durable.problem(SPARE_SECONDS)
        every, hot_every = self.settings.every_steps, self.settings.hot_every_steps
        by_steps = (every > 0 and step % every == 0) or (hot_every > 0 and step % hot_every == 0)
        return by_steps or flags.due or step == self.stable_until

    def after_step(self, step: int, content: Callable[[], Content], flags: Flags, best: bool) -> None:
        """Start the snapshots that are due after this step. One still in flight means that this step's is left out.

        Waits for the one in flight only if this step's evaluation is the best so far (`best`), or the run can be
        extended from this step; and for the new one only with snapshot.asynchronous=false. flags: as in `is_due`.
        """
        # On CUDA the flags are read one step late, so they miss a snapshot that the last step has started.
        late = self.world.device.type == "cuda"
        by_steps = self.settings.every_steps > 0 and step % self.settings.every_steps == 0
        must = (best and self.settings.keep_best) or step == self.stable_until
        if by_steps or must or flags.due:
            if must:  # the model of this step exists only now
                self.durable.wait_until_idle()
            started = late and self.settings.asynchronous and self.durable.step == step - 1
            busy = not must and (flags.busy or started)
            if not busy:
                self.durable.start(step, *content())
                if not self.settings.asynchronous:
                    self.durable.wait_until_idle()
            elif by_steps and self.world.is_main:
                self.log(f"step {step}: no snapshot, that of step {self.durable.step} is still being written")
            if self.durable.step == step:
                self._last = time.monotonic()
        if self.hot and step % self.settings.hot_every_steps == 0:
            busy = flags.hot_busy or (late and self.hot.step == step - 1)
            if not busy:
                self.hot.start(step, *content())

    def last(self, step: int, content: Content, stopping: bool) -> str | None:
        """Save the last step of an attempt and wait. Returns its digest, or None if it is not durable in time.

        Time is limited by snapshot.grace_seconds or a cloud's notice, and only when the attempt was asked to stop. Then
        the hot snapshot is started first, since that is fast.
        """
        limits = [self.settings.grace_seconds, *self.world.gather(self.notice_seconds())] if stopping else []
        grace = min(filter(None, limits), default=0)
        if not grace:
            return self.durable.save(step, *content)
        deadline = time.monotonic() + grace
        in_memory = self._start_hot(step, content, deadline)
        own = grace == self.settings.grace_seconds
        limit = f"snapshot.grace_seconds={grace:g}" if own else f"the {grace:g} s that a cloud's notice leaves"
        digest, why = None, f"the snapshot did not reach {self.store.url} within {limit}"
        try:
            self.durable.wait_until_idle(deadline - time.monotonic())
            self.durable.start(step, *content, log_failure=False)
            digest = self.durable.wait(deadline - time.monotonic())
        except SnapshotFailed as error:
            why = str(error)
        except TimeoutError:
            pass
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
        ready = self.hot is not None and not self.hot.broken
        try:
            if self.hot is not None and ready:
                self.hot.wait_until_idle(max(deadline - time.monotonic(), HOT_SECONDS))
            ready = all(self.world.gather(ready)) if self.sharded else ready
            if self.hot is not None and ready:
                self.hot.start(step, *content)
        except Exception as error:
            self.log(f"step {step}: no hot snapshot: {str(error) or type(error).__name__}")
            return False
        return ready

    def _wait_for_hot(self) -> bool:
        assert self.hot
        try:
            self.hot.wait(SPARE_SECONDS)  # long, since another process may have started late
        except Exception:  # the writer has logged it, or it was too late
            return False
        return True

    def make_durable(self, loaded: Restored, state: SharedState) -> str:
        """Save the run's last step, which only a node's memory has, in the durable store. Returns its digest.

        Called by all processes, at the end: it also removes the hot snapshots.
        """
        digest = self.durable.save(loaded.manifest.step, state, loaded.manifest.metrics)
        self.close()
        return digest

    def is_durable(self, loaded: Restored) -> bool:
        """Whether what was restored is durable, and not only in a node's memory. Called by all processes."""

        def stored() -> bool:
            if loaded.url == self.store.url:
                return True
            if (self.base.step, self.base.digest) != (loaded.manifest.step, loaded.manifest.digest):
                return False
            try:
                verify(self.store, loaded.manifest.step)  # if it is damaged, the only good copy is in memory
            except (Damaged, Unreadable):
                return False
            return True

        return bool(self.world.run_on_main(stored))

    def keep(self) -> int:
        """Before an end without a snapshot: wait for the one in flight, and keep the hot ones.

        Returns the newest durable step, 0 if there is none. Called by all processes.
        """
        with suppress(TimeoutError):
            self.durable.wait_until_idle(self.timeout)
        self._keep_hot = True
        return int(self.world.run_on_main(lambda: max(self.store.steps(), default=0)))

    def forget_hot(self) -> None:
        """Remove the hot snapshots of an attempt that was killed after the run's last step was durable."""
        if self.hot_store and self.world.local_rank == 0:
            hot.remove(self.hot_store)

    def close(self) -> None:
        """Remove the hot snapshots if the attempt's last step is durable. Called by all processes, at the end."""
        if self.hot:
            with suppress(TimeoutError):
                self.hot.wait_until_idle(SPARE_SECONDS)
        self.world.barrier()
        if self.hot and not self._keep_hot and self.hot.world.is_main:
            hot.remove(self.hot.store)
