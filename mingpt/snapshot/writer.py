"""Write snapshots in a background thread, together with the other processes.

Each process writes its share of the parts and reports to rank 0, which writes the manifest and broadcasts the result.
Reports travel over a process group of their own, so no collective of the training waits for a store.
"""

import math
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from mingpt.errors import SnapshotFailed, Superseded, UserError
from mingpt.snapshot.attempts import Attempt
from mingpt.snapshot.format import Metrics, SharedState
from mingpt.snapshot.retention import Retention, plan
from mingpt.snapshot.staging import Staged, Staging
from mingpt.snapshot.store import Store
from mingpt.snapshot.storewriter import StoreWriter, raise_first
from mingpt.world.world import World

T = TypeVar("T")
UNMEASURED = Metrics()


def use_device(device: torch.device) -> None:
    """A thread begins with GPU 0 as its device: each process would take memory of that one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _within(limit_seconds: float | None, wait: Callable[[float | None], T]) -> T:
    try:
        return wait(None if limit_seconds is None else max(0.0, limit_seconds))
    except futures.TimeoutError as late:  # in Python 3.10 not the builtin TimeoutError
        raise TimeoutError from late


@dataclass
class SnapshotWriter:
    """Writes the snapshots of one attempt, and deletes those that retention does not keep.

    world: the processes, with a group for this writer alone; the group's time limit must be longer than limit_seconds
    plus one call of the store.
    everyone: all processes, with a group for this writer alone, if `world` is a part of them; they exchange slices.
    provenance: the manifest's fields beside the state: run, vocabulary, config, fingerprint, history.
    committed(step, digest, seconds): called in every process, in the writer's thread.
    lost(step, failures in a row, reason): called in rank 0, in the writer's thread, if the run goes on without it.
    claim: the attempt's claim, in rank 0. None: no other attempt can be writing.
    retry_seconds: for how long one write that fails is retried.
    verify: read each part back before the commit.
    limit_seconds: for all writes of a process together, and again for the commit.
    """

    store: Store
    world: World
    retention: Retention
    provenance: Mapping[str, Any]
    log: Callable[[str], None]
    committed: Callable[[int, str, float], None] = lambda step, digest, seconds: None
    lost: Callable[[int, int, str], None] = lambda step, in_a_row, reason: None
    claim: Attempt | None = None
    everyone: World | None = None
    retry_seconds: float = 0
    verify: bool = False
    limit_seconds: float = math.inf
    step: int | None = None  # of the snapshot that was started last
    failures: int = 0  # in a row; equal in all processes, though not updated at the same moment
    broken: bool = False  # it can't write any more: a newer attempt has started, or the process group has failed
    _val_losses: dict[int, float | None] = field(default_factory=dict)  # by step, of committed snapshots
    _job: "Future[str] | None" = None
    _pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._staging = Staging(self.world, self.everyone)
        self._pool = ThreadPoolExecutor(1, "snapshot", initializer=partial(use_device, self.world.device))
        self._writer = StoreWriter(
            self.store,
            self.provenance,
            log=self.log,
            claim=self.claim,
            retry_seconds=self.retry_seconds,
            verify=self.verify,
            limit_seconds=self.limit_seconds,
        )

    @property
    def busy(self) -> bool:
        """Whether a snapshot is in flight."""
        return self._job is not None and not self._job.done()

    def save(self, step: int, state: SharedState, metrics: Metrics = UNMEASURED) -> str:
        """Save the state as step `step` and wait for it; returns the digest. Called by all processes.

        If one process can't write, all raise: UserError if the user must act (no space, no permission), otherwise
        SnapshotFailed.
        """
        self.settle()
        self.start(step, state, metrics, log_failure=False)
        return self.wait()

    def start(self, step: int, state: SharedState, metrics: Metrics = UNMEASURED, log_failure: bool = True) -> None:
        """Save the state as step `step` in the background. Called by all processes, when none of them is busy."""
        assert not self.busy
        self.step = step
        staged = self._staging.copy_share(state)
        self._job = self._pool.submit(self._write, step, staged, metrics, time.monotonic(), log_failure)

    def wait(self, limit_seconds: float | None = None) -> str:
        """Wait for the snapshot in flight; returns its digest. Raises as `save`, or TimeoutError."""
        assert self._job is not None
        return _within(limit_seconds, self._job.result)

    def settle(self, limit_seconds: float | None = None) -> None:
        """Wait until nothing is in flight, whether it succeeded or failed. Raises TimeoutError."""
        if self._job is not None:
            _within(limit_seconds, self._job.exception)

    def problem(self, limit_seconds: float) -> Exception:
        """Why the last snapshot failed, for the exception that ends the run in all processes."""
        with suppress(TimeoutError):  # this process may still be writing
            self.settle(limit_seconds)
        found = self._job.exception() if self._job is not None and self._job.done() else None
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
        self.failures += 1
        self.broken = self.broken or isinstance(error, Superseded)
        if log_it and not isinstance(error, Superseded):
            goes_on = "The run ends here" if self.broken and self.store.key != "snapshot.hot_dir" else "The run goes on"
            self.log(f"SNAPSHOT FAILED ({self.failures} in a row): {error}. {goes_on}.")
            if self.world.is_main:
                self.lost(step, self.failures, str(error))

    def _write_together(self, step: int, staged: Staged, metrics: Metrics, began: float) -> str:
        self._staging.wait()
        # Once more if parts are gone. Not with `everyone`: those outside of `world` take part in the writing, too.
        for last in (self.everyone is not None, True):
            reports = self.world.gather(self._writer.write_parts(step, self._staging.parts(staged)))
            raise_first(reports)
            result = self.world.broadcast(self._writer.commit(step, reports, metrics) if self.world.is_main else None)
            if last or "again" not in result:
                break
            if self.world.is_main:
                self.log(f"{result['error']}: it is written again")
        raise_first([result])
        digest = str(result["digest"])
        self.failures = 0
        if self.world.is_main:  # after the broadcast, for which the others wait: deleting may take long
            self._prune(step)
        self._call_committed(step, digest, time.monotonic() - began)
        return digest

    def _call_committed(self, step: int, digest: str, seconds: float) -> None:
        """An error in the callback is logged and no more: the snapshot is committed."""
        try:
            self._writer.retry(lambda: self.committed(step, digest, seconds))
        except BaseException as error:
            self.log(f"step {step}: snapshot {digest[:16]} in {seconds:.2f} s; what follows it failed: {error}")

    def _prune(self, step: int) -> None:
        """An error is logged and no more: it costs space, and the next snapshot tries again."""
        try:
            plan(self.store, self.retention, step, self._val_losses).apply(self.store)
        except BaseException as error:
            self.log(f"old snapshots could not be deleted: {error}; the next snapshot tries again")
