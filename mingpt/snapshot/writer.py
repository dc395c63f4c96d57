"""Write snapshots in a background thread, together with the other processes.

Each process writes its share of the parts and reports to all; rank 0 writes the manifest and broadcasts the result.
Reports travel over a process group of their own, so no collective of the training waits for a store. They are JSON, in
which {"error": …} stands for an exception. Errors that may pass are retried.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mingpt.cli.console import Say
from mingpt.errors import Damaged, SnapshotFailed, Superseded, Unreadable, UserError
from mingpt.snapshot.attempts import Attempt
from mingpt.snapshot.format import Manifest, Metrics, PartInfo, SharedState, TensorInfo, digest_of, encode_part
from mingpt.snapshot.reader import PARALLEL_PARTS, Seen, read_back, read_manifest
from mingpt.snapshot.retention import Retention, plan
from mingpt.snapshot.staging import Staged, StagedPart, Staging, trim_memory
from mingpt.snapshot.store import OVERTAKEN, Store
from mingpt.snapshot.tries import Tries, failure, raise_first, started_pool, use_device
from mingpt.world.world import World

UNMEASURED = Metrics()
LOOK_SECONDS = 0.5  # between two looks at whether the snapshot that is waited for takes too long


@dataclass
class SnapshotWriter:
    """Writes the snapshots of one attempt, and deletes those that retention does not keep."""

    store: Store
    # The processes that write one snapshot together, with a group for this writer alone. The group's time limit must be
    # longer than limit_seconds plus one call of the store, or a slow store looks like a dead process.
    world: World
    retention: Retention
    # The manifest's fields beside the state: run, vocabulary, config, fingerprint, history.
    provenance: Mapping[str, Any]
    log: Say
    # committed(step, digest, seconds): called in every process, in the writer's thread.
    committed: Callable[[int, str, float], None] = lambda step, digest, seconds: None
    # lost(step, failures in a row, reason): called in rank 0, in the writer's thread, when a snapshot has failed.
    lost: Callable[[int, int, str], None] = lambda step, in_a_row, reason: None
    # The attempt's claim, in rank 0. None: no other attempt can be writing.
    claim: Attempt | None = None
    # All processes, with a group for this writer alone, if `world` is a part of them: they exchange slices.
    everyone: World | None = None
    # The ranks of `world` that write parts, rank 0 among them; None: all. The others send their slices, and hear what
    # became of the snapshot, as all do: the store may be on a disk that they do not see.
    writers: Sequence[int] | None = None
    # For how long one write that fails is tried again.
    retry_seconds: float = 0
    # Whether each part is read back before the commit.
    verify: bool = False
    # For all writes of a process together, and again for the commit.
    limit_seconds: float = math.inf
    # The same with the last call of the store, and for deleting old ones. A snapshot that takes longer has failed,
    # though its thread may never return: a local disk (a dead NFS mount) has no limit of its own.
    hang_seconds: float = math.inf
    # Failures in a row after which it has given up.
    max_failures: int = 2**31
    step: int | None = None  # of the snapshot that was started last
    failures: int = 0  # in a row; equal in all processes, though not updated at the same moment
    # It can't write any more: a newer attempt has started, the process group has failed, or a thread does not return.
    broken: bool = False
    _val_losses: Seen = field(default_factory=dict)
    _job: "Future[str] | None" = None
    _hangs: SnapshotFailed | None = None  # the snapshot in flight has failed, since it takes too long
    _until: float = math.inf  # when this process's own work on it must be done

    def __post_init__(self) -> None:
        writers = range(self.world.size) if self.writers is None else self.writers
        self._staging = Staging(self.world, self.everyone, writers)
        self._tries = Tries(self.store, self.log, self.retry_seconds, self.limit_seconds)
        # Parts that are written at a time. Each takes up to 64 MiB where it is put together from slices.
        self._ahead = max(2, PARALLEL_PARTS // len(writers))
        self._pool = started_pool(1, "snapshot", partial(use_device, self.world.device))
        self._part_pool = started_pool(self._ahead, "part")

    @property
    def busy(self) -> bool:
        """Whether a snapshot is in flight."""
        return self._job is not None and not self._job.done()

    @property
    def gave_up(self) -> bool:
        return self.broken or self.failures >= self.max_failures

    def save(self, step: int, state: SharedState, metrics: Metrics = UNMEASURED) -> str:
        """Save the state as step `step` and wait for it; returns the digest. Called by all processes.

        If one process can't write, all raise: UserError if the user must act (no space, no permission), otherwise
        SnapshotFailed.
        """
        self.wait_until_idle()
        self.start(step, state, metrics, log_failure=False)
        return self.wait()

    def start(self, step: int, state: SharedState, metrics: Metrics = UNMEASURED, log_failure: bool = True) -> None:
        """Save the state as step `step` in the background. Called by all processes, when none of them is busy."""
        assert not self.busy  # the buffers of the one in flight would be overwritten
        self.step = step
        staged = self._staging.copy_share(state)
        self._job = self._pool.submit(self._write, step, staged, metrics, time.monotonic(), log_failure)

    def wait(self, limit_seconds: float = math.inf) -> str:
        """Wait for the snapshot in flight; returns its digest. Raises as `save`, or TimeoutError."""
        assert self._job is not None
        self.wait_until_idle(limit_seconds)
        return self._job.result()

    def wait_until_idle(self, limit_seconds: float = math.inf) -> None:
        """Wait until nothing is in flight, whether it succeeded or failed.

        Raises TimeoutError, also if what is in flight has failed because it takes too long.
        """
        end = time.monotonic() + limit_seconds
        # In short waits, since the thread that writes may never return.
        while self._job is not None and not self._job.done():
            self.fail_if_it_hangs()
            if self._hangs or time.monotonic() >= end:
                raise TimeoutError(str(self._hangs or ""))
            futures.wait([self._job], min(LOOK_SECONDS, end - time.monotonic()))

    def fail_if_it_hangs(self) -> None:
        """Count the snapshot in flight as failed if it takes too long. Call it now and then; it never waits."""
        if time.monotonic() > self._until and self.busy and not self._hangs:
            self.broken = True  # this thread, and the group in which others may wait for it, can't be used again
            self._hangs = SnapshotFailed(
                f"the snapshot of step {self.step} has been in flight for too long: {self.store.shown} has not ended "
                f"a write within {self.hang_seconds:g} s (world.timeout_seconds={self.limit_seconds:g}, and what one "
                f"call may take, MINGPT_STORE_SECONDS): look at that disk or network, or raise one of them"
            )
            self._count_failure(self.step or 0, self._hangs, log_it=True)

    def problem(self, limit_seconds: float) -> Exception:
        """Why the last snapshot failed, for the exception that ends the run in all processes."""
        with suppress(TimeoutError):  # this process may still be writing
            self.wait_until_idle(limit_seconds)
        found = self._job.exception() if self._job is not None and self._job.done() else self._hangs
        if isinstance(found, Exception):
            return found
        return SnapshotFailed("another process can't write snapshots any more: the reason is in its log")

    def before_update(self) -> None:
        """Call before the state changes: a copy from the device may still be under way."""
        self._staging.hold_update()

    def _write(self, step: int, staged: Staged, metrics: Metrics, began: float, log_failure: bool) -> str:
        """Runs in the writer's thread. Logs and counts any exception; all processes come to the same result."""
        try:
            return self._write_together(step, staged, metrics, began)
        except (UserError, SnapshotFailed) as error:
            self._count_failure(step, error, log_failure and self.world.is_main)
            raise
        except BaseException as error:  # a client library may raise SystemExit
            # A collective has failed. gloo then closes the group's connections, so it can't be used again, and nobody
            # knows which process is to blame: every process logs it, and the run ends with the next step.
            self.broken = True
            what = str(error).strip().splitlines() or [type(error).__name__]
            failed = SnapshotFailed(
                f"the processes could not agree on the snapshot of step {step} ({what[0]}): one of them has died, or "
                f"has been waiting for its store for too long: look for the one whose log says why, or raise "
                f"world.timeout_seconds"
            )
            self._count_failure(step, failed, log_failure)
            raise failed from error

    def _count_failure(self, step: int, error: Exception, log_it: bool) -> None:
        if self._hangs and error is not self._hangs:  # counted already: its thread has come back after all
            return
        self.failures += 1
        self.broken = self.broken or isinstance(error, Superseded)
        if log_it and not isinstance(error, Superseded):
            ends = self.gave_up and self.store.key != "snapshot.hot_dir"
            self.log(
                f"SNAPSHOT FAILED ({self.failures} in a row): {error}. The run {'ends here' if ends else 'goes on'}."
            )
            if self.world.is_main:
                self.lost(step, self.failures, str(error))

    def _write_together(self, step: int, staged: Staged, metrics: Metrics, began: float) -> str:
        trim_memory(staged)
        self._staging.wait()
        # Once more if parts are gone. Not with `everyone`: those outside of `world` take part in the writing, too.
        for last in (self.everyone is not None, True):
            with self._own_work():
                report = self.write_parts(step, self._staging.parts(staged))
            reports = self.world.gather(report)
            trim_memory(staged)
            if self.world.is_main and any("error" in report for report in reports):
                self._remove_parts(step)  # a disk that is full of them would fail the next snapshot, too
            raise_first(reports)
            with self._own_work():
                committed = self.write_manifest(step, reports, metrics) if self.world.is_main else None
            result = self.world.broadcast(committed)
            if last or not result.get("again"):
                break
            if self.world.is_main:
                self.log(f"{result['error']}: it is written again")
        if self.world.is_main and "error" in result and self.store.local:  # a disk lists a manifest that is there
            self._remove_parts(step)
        raise_first([result])
        digest = str(result["digest"])
        self.failures = 0
        if self.world.is_main:  # after the broadcast, for which the others wait: deleting may take long
            with self._own_work():
                self._prune(step)
        self._call_committed(step, digest, time.monotonic() - began)
        return digest

    @contextmanager
    def _own_work(self) -> Iterator[None]:
        """Work of this process alone, which hang_seconds limit. Waits for others have the limit of their group."""
        self._until = time.monotonic() + self.hang_seconds
        try:
            yield
        finally:
            self._until = math.inf

    def _call_committed(self, step: int, digest: str, seconds: float) -> None:
        """An error in the callback is logged and no more: the snapshot is committed."""
        try:
            self.committed(step, digest, seconds)
        except BaseException as error:
            self.log(f"step {step}: snapshot {digest[:16]} in {seconds:.2f} s; what follows it failed: {error}")

    def _prune(self, step: int) -> None:
        """An error is logged and no more: it costs space, and the next snapshot tries again."""
        try:
            plan(self.store, self.retention, step, self._val_losses).apply(self.store)
        except BaseException as error:
            self.log(f"old snapshots could not be deleted: {error}; the next snapshot tries again")

    def _remove_parts(self, step: int) -> None:
        """Delete what a snapshot that failed has left, unless a manifest names it. Called by one process."""
        try:
            if self.claim is not None:
                self.claim.check()  # a newer attempt may be writing the same parts, under the same names
            self.store.remove_parts(step)
        except Exception:  # why the snapshot failed is reported; what stays goes with a later one, as a dead writer's
            return

    def write_parts(self, step: int, staged: Iterable[StagedPart]) -> dict[str, Any]:
        """Write this process's parts. Returns their entries in the manifest, or what went wrong.

        Takes all of `staged`, whatever fails: other processes may wait for this one in it.
        """
        written: dict[str, Any] = {"parts": {}, "tensors": {}}
        deadline, writes = self._tries.deadline(), list[Future[dict[str, Any]]]()
        try:
            for one in staged:  # the next is put together while these are hashed and written
                writes.append(self._part_pool.submit(self._write_part, step, deadline, one))
                futures.wait(writes[-self._ahead : 1 - self._ahead])  # a bound of the memory
            for write in writes:
                for kind, entries in write.result().items():
                    written[kind] |= entries
        # Of any kind (a client library may raise SystemExit): the others wait for this process's report.
        except BaseException as error:
            return failure(f"the snapshot of step {step} could not be written", error)
        finally:
            futures.wait(writes)  # also after a failure: the next snapshot is copied into the same memory
        return written

    def _write_part(self, step: int, deadline: float, staged: StagedPart) -> dict[str, Any]:
        """Its entries in the manifest; not its bytes, which must not outlive this call."""
        part = encode_part(*staged)

        def write() -> None:
            self.store.write_part(step, part.name, part.pieces)
            if self.verify:
                read_back(self.store, step, part)

        self._tries.retry(write, deadline)
        tensors = {name: info.model_dump() for name, info in part.tensors.items()}
        return {"parts": {part.name: {"size": part.size}}, "tensors": tensors}

    def write_manifest(self, step: int, reports: list[dict[str, Any]], metrics: Metrics) -> dict[str, Any]:
        """Write the manifest for the parts that all processes report. Returns the digest, or what went wrong."""
        try:
            parts = {name: PartInfo(**p) for r in reports for name, p in r["parts"].items()}
            tensors = {name: TensorInfo(**t) for r in reports for name, t in r["tensors"].items()}
            manifest = Manifest(
                step=step, digest=digest_of(tensors), parts=parts, tensors=tensors, metrics=metrics,
                **self.provenance,
            )  # fmt: skip
            self._tries.retry(partial(self._commit, manifest), self._tries.deadline())
        except BaseException as error:  # of any kind: the others wait for the answer
            return failure(f"the snapshot of step {step} could not be committed in {self.store.url}", error)
        return {"digest": manifest.digest}

    def _commit(self, manifest: Manifest) -> None:
        if self.claim is not None:  # a preempted node that wakes up must not commit beside the attempt that replaced it
            self.claim.check()
        # A store may drop bytes silently (pytorch#183878). With a folder that the nodes don't share, each node sees its
        # own parts alone.
        self.store.check_parts(manifest)
        if not self.store.commit(manifest):
            self._replace_older(manifest)
        if self.verify:  # if it is damaged, the next try sets it aside
            read_manifest(self.store, manifest.step)
        if self.claim is not None:  # a newer attempt may have started meanwhile; its start sets this snapshot aside
            self.claim.check()

    def _replace_older(self, ours: Manifest) -> None:
        """Another attempt has committed this step. Set its snapshot aside and commit ours, unless the digests match.

        Raises Superseded if that attempt is the newer one.
        """
        try:
            theirs = read_manifest(self.store, ours.step)
        except (Damaged, Unreadable):
            why = ""  # set aside as damaged
        else:
            if theirs.digest == ours.digest:
                return
            there = f"step {ours.step} of {self.store.url} is there, from attempt {theirs.attempt}, with another digest"
            # Equal numbers: on a store without conditional puts, two attempts may have taken the same one.
            if theirs.attempt >= ours.attempt:
                raise Superseded(
                    f"{there} ({theirs.digest[:16]}, and ours is {ours.digest[:16]}): it stays, this run ends"
                )
            self.log(f"{there}: that attempt was overtaken; its snapshot is set aside")
            why = OVERTAKEN
        self.store.set_aside(ours.step, why)
        if not self.store.commit(ours):
            raise SnapshotFailed("another attempt writes the same step at the same time")
