"""Writing snapshots beside the training: a copy at the step's boundary, the rest in a thread of its own.

Each process copies, writes and hashes its share of the parts; when all have reported, one of them writes the manifest.
Their reports travel over a group of their own, so that no collective of the training ever waits for a store.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mingpt.atomic import Buffer
from mingpt.errors import Damaged, SnapshotFailed, Superseded, UserError
from mingpt.snapshot.attempts import Attempt
from mingpt.snapshot.files import OVERTAKEN
from mingpt.snapshot.format import (
    FORMAT,
    EncodedPart,
    Manifest,
    Metrics,
    Part,
    PartInfo,
    State,
    TensorInfo,
    digest_of,
    encode_manifest,
    encode_part,
    lay_out,
)
from mingpt.snapshot.reader import AT_A_TIME, read_manifest
from mingpt.snapshot.retention import Retention, plan
from mingpt.snapshot.store import Store
from mingpt.storage import place
from mingpt.world.world import World

T = TypeVar("T")
UNMEASURED = Metrics()
FIRST_RETRY_SECONDS = 0.5  # doubled with each further try


Copy = tuple[Part, dict[str, Tensor]]  # a part and its tensors, in CPU memory


def _in_time(ask: Callable[[float | None], T], limit_seconds: float | None) -> T:
    try:
        return ask(None if limit_seconds is None else max(0.0, limit_seconds))
    except futures.TimeoutError as late:  # Python 3.10: not yet the builtin one
        raise TimeoutError from late


def _equal(pieces: Sequence[Buffer], raw: memoryview) -> bool:
    start = 0
    for piece in pieces:
        ours, theirs = np.frombuffer(piece, np.uint8), np.frombuffer(raw[start : start + len(piece)], np.uint8)
        if not np.array_equal(ours, theirs):
            return False
        start += len(piece)
    return start == len(raw)


@dataclass
class SnapshotWriter:
    """Writes the snapshots of one attempt and deletes those that need not stay.

    world: the processes, with a group that nothing else uses, whose limit must be longer than limit_seconds and one
    call of the store together. provenance: what the manifest says beside the state: run, vocabulary, config,
    fingerprint, history. committed(step, digest, seconds) is called in every process, from the writer's thread. claim:
    the attempt's, in rank 0; None: nobody else can be writing. retry_seconds: for how long a write that fails is tried
    again, within limit_seconds for all writes of a process, and for the commit. verify: each part is read back before
    the commit.
    """

    store: Store
    world: World
    retention: Retention
    provenance: Mapping[str, Any]
    say: Callable[[str], None]
    committed: Callable[[int, str, float], None] = lambda step, digest, seconds: None
    claim: Attempt | None = None
    retry_seconds: float = 0
    verify: bool = False
    limit_seconds: float = math.inf
    step: int | None = None  # of the snapshot that was started last
    failures: int = 0  # in a row; equal in all processes, but not known to all at the same moment
    broken: bool = False  # it can write no more: overtaken by another attempt, or the processes can't agree any more
    _val_losses: dict[int, float | None] = field(default_factory=dict)  # of the snapshots that are there
    _job: "Future[str] | None" = None
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "snapshot"))
    _buffers: dict[str, Tensor] = field(default_factory=dict)
    _copied: "torch.cuda.Event | None" = None

    @property
    def busy(self) -> bool:
        """Whether a snapshot is in flight."""
        return self._job is not None and not self._job.done()

    def save(self, step: int, state: State, metrics: Metrics = UNMEASURED) -> str:
        """Save the state as step `step` and wait for it; returns the digest. Called by all processes.

        If one process can't write, all raise: UserError if the user must act (no space, no permission), else
        SnapshotFailed.
        """
        self.settle()
        self.start(step, state, metrics, shout=False)
        return self.wait()

    def start(self, step: int, state: State, metrics: Metrics = UNMEASURED, shout: bool = True) -> None:
        """Save the state as step `step` in the background. Called by all processes, when none of them is busy.

        shout: say it at once when it fails.
        """
        assert not self.busy
        self.step = step
        copies = self._copy_my_share(state)
        self._job = self._pool.submit(self._write, step, copies, metrics, time.monotonic(), shout)

    def wait(self, limit_seconds: float | None = None) -> str:
        """The digest of the snapshot in flight, or what went wrong with it, as `save` tells it, or TimeoutError."""
        assert self._job is not None
        return _in_time(self._job.result, limit_seconds)

    def settle(self, limit_seconds: float | None = None) -> None:
        """Wait until nothing is in flight; what became of it has been said. Raises TimeoutError."""
        if self._job is not None:
            _in_time(self._job.exception, limit_seconds)

    def problem(self, limit_seconds: float) -> Exception:
        """What went wrong with the last snapshot, when one of the processes has said that it can't go on."""
        with suppress(TimeoutError):  # it has not come to that here
            self.settle(limit_seconds)
        found = self._job.exception() if self._job is not None and self._job.done() else None
        if isinstance(found, Exception):
            return found
        return SnapshotFailed("another process can't write snapshots any more: the reason is in its log")

    def before_update(self) -> None:
        """Call before the state changes: a copy from the device may still be under way. Does not stop the host."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def _copy_my_share(self, state: State) -> list[Copy]:
        """Copy into buffers that stay for the next time: page faults of fresh memory cost more than the copy itself."""
        twice = state["model"].keys() & state["optimizer"].keys()
        if twice:
            raise ValueError(f"both kinds of state have a tensor named {', '.join(sorted(twice))}")
        parts = lay_out(state)
        copies: list[Copy] = []
        on_device = any(t.is_cuda for tensors in state.values() for t in tensors.values())
        stream = torch.cuda.Stream() if on_device else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # None: the current one
            for i in self.world.share(len(parts)):
                part = parts[i]
                copies.append((part, {n: self._copy(n, state[part.kind][n]) for n in part.names}))
        if stream is not None:
            self._copied = torch.cuda.Event()
            self._copied.record(stream)
        return copies

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)

    def _write(self, step: int, copies: list[Copy], metrics: Metrics, began: float, shout: bool) -> str:
        """The writer's thread. Every process comes to the same result; any exception is said here, and counts."""
        try:
            return self._write_together(step, copies, metrics, began)
        except (UserError, SnapshotFailed) as error:
            self._count(error, shout and self.world.is_main)
            raise
        except Exception as error:
            # Agreement itself has failed, and gloo closes a group's connections then: it can't be used again, and who
            # is to blame is not known. So every process speaks, and the run ends with the next step.
            self.broken = True
            what = str(error).strip().splitlines() or [type(error).__name__]
            failed = SnapshotFailed(
                f"the processes could not agree on the snapshot of step {step} ({what[0]}): one of them has died, or "
                f"has been waiting for its store for too long: look for the one whose log says why, or raise "
                f"world.timeout_seconds"
            )
            self._count(failed, shout)
            raise failed from error

    def _count(self, error: Exception, shout: bool) -> None:
        self.failures += 1
        self.broken = self.broken or isinstance(error, Superseded)
        if shout and not isinstance(error, Superseded):
            goes_on = "The run ends here" if self.broken and self.store.key != "snapshot.hot_dir" else "The run goes on"
            self.say(f"SNAPSHOT FAILED ({self.failures} in a row): {error}. {goes_on}.")

    def _write_together(self, step: int, copies: list[Copy], metrics: Metrics, began: float) -> str:
        if self._copied is not None:
            self._copied.synchronize()
        reports = self.world.gather(self._write_my_parts(step, copies))
        self._raise_first(reports)
        answer = self.world.broadcast(self._committed(step, reports, metrics) if self.world.is_main else None)
        self._raise_first([answer])
        self.failures = 0
        if self.world.is_main:  # after the answer: the others wait for that, and deleting may take long
            self._tidy(step)
        self._tell(step, answer["digest"], time.monotonic() - began)
        return str(answer["digest"])

    def _tell(self, step: int, digest: str, seconds: float) -> None:
        """Whatever goes wrong here, the snapshot is safe."""
        try:
            self._patiently(lambda: self.committed(step, digest, seconds), self._deadline())
        except Exception as error:
            self.say(f"step {step}: snapshot {digest[:16]} in {seconds:.2f} s; what follows it failed: {error}")

    def _write_my_parts(self, step: int, copies: list[Copy]) -> dict[str, Any]:
        """Write this process's share of the parts; what it wrote, or what went wrong, as JSON for the others."""
        written: dict[str, Any] = {"parts": {}, "tensors": {}}
        try:
            with ThreadPoolExecutor(AT_A_TIME) as pool:
                for part in pool.map(partial(self._write_part, step, self._deadline()), copies):
                    written["parts"][part.name] = {"size": part.size}
                    written["tensors"] |= {n: t.model_dump() for n, t in part.tensors.items()}
        except Exception as error:  # whatever it is, the others must hear of it instead of waiting for this process
            return self._failure(f"the snapshot of step {step} could not be written", error)
        return written

    def _write_part(self, step: int, deadline: float, copy: Copy) -> EncodedPart:
        part = encode_part(*copy)

        def write() -> None:
            self.store.write(step, part.name, part.pieces)
            if self.verify and not _equal(part.pieces, self.store.read_part(step, part.name, part.size)):
                raise SnapshotFailed(f"{part.name} was read back with other bytes than were written")

        self._patiently(write, deadline)
        return part

    def _committed(self, step: int, reports: list[dict[str, Any]], metrics: Metrics) -> dict[str, Any]:
        """Commit; the digest, or what went wrong, as JSON for the others: whatever it is, they wait for it."""
        try:
            digest = self._commit(step, reports, metrics)
        except Superseded as no:
            return {"error": str(no), "superseded": True}
        except Exception as error:
            return self._failure(f"the snapshot of step {step} could not be committed in {self.store.url}", error)
        return {"digest": digest}

    def _commit(self, step: int, reports: list[dict[str, Any]], metrics: Metrics) -> str:
        parts = {name: PartInfo(**p) for r in reports for name, p in r["parts"].items()}
        tensors = {name: TensorInfo(**t) for r in reports for name, t in r["tensors"].items()}
        manifest = Manifest(
            format=FORMAT,
            step=step,
            digest=digest_of(tensors),
            parts=parts,
            tensors=tensors,
            metrics=metrics,
            **self.provenance,
        )

        def commit() -> None:
            if self.claim is not None:
                self.claim.check()
            for name, part in parts.items():
                # A store may drop bytes without a word (pytorch#183878), and a folder that the nodes don't share looks
                # to each node as if all went well.
                if (size := self._size(step, name)) != part.size:
                    found = "is not there" if size is None else f"has {size} bytes in place of {part.size}"
                    raise SnapshotFailed(
                        f"{name} {found} after it was written; with several nodes, {self.store.key} must be "
                        f"a place that all of them share"
                    )
            if not self.store.commit(step, encode_manifest(manifest)):
                self._meet(step, manifest)
            if self.claim is not None:  # a commit may take minutes; what came too late is set aside by the next start
                self.claim.check()

        self._patiently(commit, self._deadline())
        return manifest.digest

    def _tidy(self, step: int) -> None:
        """Whatever goes wrong here costs room and not the snapshot; it is tried again after the next one."""
        try:
            plan(self.store, self.retention, step, self._val_losses).apply(self.store)
        except Exception as error:
            self.say(f"what need not stay could not be deleted: {error}")

    def _meet(self, step: int, ours: Manifest) -> None:
        """Another attempt has committed this step before us. The newer attempt takes precedence, unless both are equal.

        Raises Superseded if ours is the older one.
        """
        try:
            theirs = read_manifest(self.store, step)
        except Damaged:
            theirs, why = None, ""
        if theirs is not None:
            if theirs.digest == ours.digest:
                return
            there = f"step {step} of {self.store.url} is there, from attempt {theirs.attempt}, with another digest"
            if theirs.attempt >= ours.attempt:
                raise Superseded(
                    f"{there} ({theirs.digest[:16]}, and ours is {ours.digest[:16]}): it stays, this run ends"
                )
            self.say(f"{there}: that attempt was overtaken; its snapshot is set aside")
            why = OVERTAKEN
        self.store.set_aside(step, why)
        if not self.store.commit(step, encode_manifest(ours)):
            raise SnapshotFailed("another attempt writes the same step at the same time")

    def _deadline(self) -> float:
        return time.monotonic() + self.limit_seconds

    def _patiently(self, act: Callable[[], T], deadline: float) -> T:
        """Do it, again and again while the store fails in a way that may pass, with growing pauses.

        deadline: no try begins after it. So all of them end within one call of the store beyond it, and the others, who
        wait for this process's report, can know how long that may take.
        """
        own, pause = min(deadline, time.monotonic() + self.retry_seconds), FIRST_RETRY_SECONDS
        while True:
            if time.monotonic() > deadline:
                raise SnapshotFailed(
                    f"writing has taken longer than world.timeout_seconds={self.limit_seconds:g}: raise that, or use a "
                    f"faster {self.store.key}"
                )
            try:
                with place(self.store.key, self.store.url):
                    return act()
            except UserError:
                raise
            except Exception as error:
                if time.monotonic() + pause > own:
                    raise
                self.say(f"{error}: next try in {pause:g} s")
            time.sleep(pause)
            pause *= 2

    def _size(self, step: int, name: str) -> int | None:
        try:
            return self.store.size(step, name)
        except FileNotFoundError:
            return None

    @staticmethod
    def _failure(what: str, error: Exception) -> dict[str, Any]:
        return {"error": f"{what}: {error}", "mistake": isinstance(error, UserError)}

    @staticmethod
    def _raise_first(reports: list[dict[str, Any]]) -> None:
        for report in reports:
            if report.get("superseded"):
                raise Superseded(report["error"])
            if "error" in report:
                raise (UserError if report["mistake"] else SnapshotFailed)(report["error"])
