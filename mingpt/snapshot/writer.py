"""Writing snapshots: the parts are shared out among the processes, the manifest comes last."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mingpt.distributed import World
from mingpt.errors import Mistake
from mingpt.snapshot.format import (
    FORMAT,
    Manifest,
    PartInfo,
    State,
    TensorInfo,
    digest_of,
    encode_manifest,
    encode_part,
    lay_out,
)
from mingpt.snapshot.store import Store
from mingpt.storage import place


class SnapshotFailed(Exception):
    """The store failed in a way that may pass."""


@dataclass
class SnapshotWriter:
    """Writes the snapshots of one attempt and keeps the newest `keep`.

    `provenance` is what the manifest says beside the state: run, vocabulary, config, fingerprint, history.
    """

    store: Store
    world: World
    keep: int
    provenance: Mapping[str, Any]
    say: Callable[[str], None]

    def save(self, step: int, state: State) -> str:
        """Save the state as step `step`; returns the digest. Called by all processes; returns after the commit.

        If one process can't write, all raise: Mistake if the user must act (no space, no permission), else
        SnapshotFailed.
        """
        report = self._write_my_parts(step, state)
        reports = self.world.gather(report)
        self._raise_first(reports)
        digest = self.world.from_speaker(self._commit(step, reports) if self.world.speaks else None)
        self._raise_first([digest])
        return str(digest["digest"])

    def _write_my_parts(self, step: int, state: State) -> dict[str, Any]:
        """Write this process's share of the parts; what it wrote, or what went wrong, as JSON for the others."""
        parts = lay_out(state)
        twice = state["model"].keys() & state["optimizer"].keys()
        if twice:
            raise ValueError(f"both kinds of state have a tensor named {', '.join(sorted(twice))}")
        written: dict[str, Any] = {"parts": {}, "tensors": {}}
        try:
            with place(self.store.key, self.store.url):
                for i in self.world.share(len(parts)):
                    name, raw, part, tensors = encode_part(parts[i], state[parts[i].kind])
                    self.store.write(step, name, raw)
                    written["parts"][name] = part.model_dump()
                    written["tensors"] |= {n: t.model_dump() for n, t in tensors.items()}
        except Exception as error:  # whatever it is, the others must hear of it instead of waiting for this process
            return self._failure(f"the snapshot of step {step} could not be written", error)
        return written

    def _commit(self, step: int, reports: list[dict[str, Any]]) -> dict[str, Any]:
        parts = {name: PartInfo(**p) for r in reports for name, p in r["parts"].items()}
        tensors = {name: TensorInfo(**t) for r in reports for name, t in r["tensors"].items()}
        manifest = Manifest(
            format=FORMAT, step=step, digest=digest_of(tensors), parts=parts, tensors=tensors, **self.provenance
        )
        try:
            with place(self.store.key, self.store.url):
                for name, part in parts.items():
                    # A store may drop bytes without a word (pytorch#183878), and a folder that the nodes don't share
                    # looks to each node as if all went well.
                    if (size := self._size(step, name)) != part.size:
                        found = "is not there" if size is None else f"has {size} bytes in place of {part.size}"
                        raise SnapshotFailed(
                            f"{name} {found} after it was written; with several nodes, {self.store.key} must be "
                            f"a place that all of them share"
                        )
                self.store.commit(step, encode_manifest(manifest))
                for old in self.store.steps()[self.keep :]:
                    self.store.delete(old)
        except Exception as error:
            return self._failure(f"the snapshot of step {step} could not be committed in {self.store.url}", error)
        return {"digest": manifest.digest}

    def _size(self, step: int, name: str) -> int | None:
        try:
            return self.store.size(step, name)
        except FileNotFoundError:
            return None

    @staticmethod
    def _failure(what: str, error: Exception) -> dict[str, Any]:
        return {"error": f"{what}: {error}", "mistake": isinstance(error, Mistake)}

    @staticmethod
    def _raise_first(reports: list[dict[str, Any]]) -> None:
        for report in reports:
            if "error" in report:
                raise (Mistake if report["mistake"] else SnapshotFailed)(report["error"])
