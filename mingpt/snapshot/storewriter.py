"""Put one snapshot into a store: this process's parts, and in rank 0 the commit. Errors that may pass are retried.

Results are JSON, since the processes exchange them: {"error": …} stands for an exception.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mingpt.errors import Damaged, Incomplete, SnapshotFailed, Superseded, TransientError, UserError
from mingpt.localfile import Buffer
from mingpt.snapshot.attempts import Attempt
from mingpt.snapshot.files import OVERTAKEN
from mingpt.snapshot.format import FORMAT, Manifest, Metrics, PartInfo, TensorInfo, digest_of, encode_part
from mingpt.snapshot.manifest import encode_manifest
from mingpt.snapshot.reader import PARALLEL_PARTS, read_manifest
from mingpt.snapshot.staging import StagedPart
from mingpt.snapshot.store import Store

T = TypeVar("T")
FIRST_RETRY_SECONDS = 0.5  # doubled with each further try


@dataclass
class StoreWriter:
    """Writes the parts and manifests of one attempt. The fields are those of SnapshotWriter."""

    store: Store
    provenance: Mapping[str, Any]
    log: Callable[[str], None]
    claim: Attempt | None = None
    retry_seconds: float = 0
    verify: bool = False
    limit_seconds: float = math.inf

    def write_parts(self, step: int, staged: Iterable[StagedPart]) -> dict[str, Any]:
        """Write this process's parts. Returns their entries in the manifest, or what went wrong.

        Takes all of `staged`, whatever fails: other processes may wait for this one in it.
        """
        written: dict[str, Any] = {"parts": {}, "tensors": {}}
        deadline, writes = self._deadline(), list[Future[tuple[str, dict[str, Any]]]]()
        try:
            with ThreadPoolExecutor(PARALLEL_PARTS) as pool:
                for one in staged:
                    writes.append(pool.submit(self._write_part, step, deadline, one))
                    wait(writes[-PARALLEL_PARTS : -PARALLEL_PARTS + 1])  # a bound of the memory
                for name, part in [write.result() for write in writes]:
                    written["parts"][name] = {"size": part["size"]}
                    written["tensors"] |= part["tensors"]
        except BaseException as error:  # of any kind: the others wait for this process's report
            return _failure(f"the snapshot of step {step} could not be written", error)
        return written

    def _write_part(self, step: int, deadline: float, staged: StagedPart) -> tuple[str, dict[str, Any]]:
        """Its name, and its entries in the manifest; not its bytes, which must not outlive this call."""
        part = encode_part(*staged)

        def write() -> None:
            self.store.write_part(step, part.name, part.pieces)
            if self.verify and not _same_bytes(part.pieces, self.store.read_part(step, part.name, part.size)):
                raise SnapshotFailed(f"{part.name} was read back with other bytes than were written")

        self.retry(write, deadline)
        return part.name, {"size": part.size, "tensors": {n: t.model_dump() for n, t in part.tensors.items()}}

    def commit(self, step: int, reports: list[dict[str, Any]], metrics: Metrics) -> dict[str, Any]:
        """Write the manifest for the parts that all processes report. Returns the digest, or what went wrong."""
        try:
            parts = {name: PartInfo(**p) for r in reports for name, p in r["parts"].items()}
            tensors = {name: TensorInfo(**t) for r in reports for name, t in r["tensors"].items()}
            manifest = Manifest(
                format=FORMAT, step=step, digest=digest_of(tensors), parts=parts, tensors=tensors, metrics=metrics,
                **self.provenance,
            )  # fmt: skip
            self.retry(partial(self._commit, manifest))
        except Superseded as error:
            return {"error": str(error), "superseded": True}
        except BaseException as error:  # of any kind: the others wait for the answer
            failure = _failure(f"the snapshot of step {step} could not be committed in {self.store.url}", error)
            return failure | ({"again": True} if isinstance(error, Incomplete) else {})
        return {"digest": manifest.digest}

    def _commit(self, manifest: Manifest) -> None:
        if self.claim is not None:
            self.claim.check()
        # A store may drop bytes silently (pytorch#183878). With a folder that the nodes don't share, each node sees its
        # own parts alone.
        self.store.check_parts(manifest)
        if not self.store.commit(manifest.step, encode_manifest(manifest)):
            self._replace_older(manifest)
        if self.claim is not None:  # a newer attempt may have started meanwhile; its start sets this snapshot aside
            self.claim.check()

    def _replace_older(self, ours: Manifest) -> None:
        """Another attempt has committed this step. Set its snapshot aside and commit ours, unless the digests match.

        Raises Superseded if that attempt is the newer one.
        """
        try:
            theirs = read_manifest(self.store, ours.step)
        except Damaged:
            why = ""
        else:
            if theirs.digest == ours.digest:
                return
            there = f"step {ours.step} of {self.store.url} is there, from attempt {theirs.attempt}, with another digest"
            if theirs.attempt >= ours.attempt:
                raise Superseded(
                    f"{there} ({theirs.digest[:16]}, and ours is {ours.digest[:16]}): it stays, this run ends"
                )
            self.log(f"{there}: that attempt was overtaken; its snapshot is set aside")
            why = OVERTAKEN
        self.store.set_aside(ours.step, why)
        if not self.store.commit(ours.step, encode_manifest(ours)):
            raise SnapshotFailed("another attempt writes the same step at the same time")

    def _deadline(self) -> float:
        return time.monotonic() + self.limit_seconds

    def retry(self, act: Callable[[], T], deadline: float | None = None) -> T:
        """Call `act` until it succeeds, for retry_seconds, with growing pauses. A UserError is raised at once.

        No try begins after the deadline (default: limit_seconds from now). So the last one ends within one call of the
        store after it, and the other processes can know how long to wait for this one.
        """
        deadline = self._deadline() if deadline is None else deadline
        last_try, pause = min(deadline, time.monotonic() + self.retry_seconds), FIRST_RETRY_SECONDS
        while True:
            if time.monotonic() > deadline:
                raise SnapshotFailed(
                    f"writing has taken longer than world.timeout_seconds={self.limit_seconds:g}: raise that, or use a "
                    f"faster {self.store.key}"
                )
            try:
                with self.store.named_errors():
                    return act()
            except UserError:
                raise
            except Exception as error:
                if time.monotonic() + pause > last_try:
                    raise
                self.log(f"{error}: next try in {pause:g} s")
            time.sleep(pause)
            pause *= 2


def raise_first(results: Sequence[dict[str, Any]]) -> None:
    """Raise the first error among results, as the exception that it was."""
    for result in results:
        if result.get("superseded"):
            raise Superseded(result["error"])
        if "error" in result:
            raise (UserError if result["user_error"] else SnapshotFailed)(result["error"])


def _failure(what: str, error: BaseException) -> dict[str, Any]:
    kind = "" if isinstance(error, (UserError, TransientError, SnapshotFailed)) else f"{type(error).__name__}: "
    return {"error": f"{what}: {kind}{error}", "user_error": isinstance(error, UserError)}


def _same_bytes(pieces: Sequence[Buffer], raw: memoryview) -> bool:
    start = 0
    for piece in pieces:
        ours, theirs = np.frombuffer(piece, np.uint8), np.frombuffer(raw[start : start + len(piece)], np.uint8)
        if not np.array_equal(ours, theirs):
            return False
        start += len(piece)
    return start == len(raw)
