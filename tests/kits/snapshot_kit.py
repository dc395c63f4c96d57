"""What the tests of snapshots share: small states, a writer alone in its world, manifests that an attacker signed."""

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mingpt.snapshot.format import Kind, Manifest, Metrics, State
from mingpt.snapshot.lineage import NewestDurable
from mingpt.snapshot.reader import Loaded
from mingpt.snapshot.restore import Put, restore
from mingpt.snapshot.retention import Retention
from mingpt.snapshot.store import Store
from mingpt.snapshot.writer import SnapshotWriter
from mingpt.world.world import World

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), backend="gloo")
PROVENANCE: dict[str, Any] = {
    "run": "name",
    "vocabulary": {"kind": "char", "characters": "ab–漢"},
    # 1e-08 is in every run's config, and is the one JSON value with a letter that may change its case.
    "config": {"optimizer": {"eps": 1e-08}, "seed": None, "compile": False},
    "fingerprint": {"torch": "2"},
    "history": [{"attempt": 1, "world_size": 4, "at": "2026-01-01T00:00:00+00:00"}],
}


def state_of(step: int) -> State:
    """A state that is another one at each step."""
    return {
        "model": {"w": torch.arange(6.0).view(2, 3) + step, "b": torch.full((4,), step, dtype=torch.bfloat16)},
        "optimizer": {"w.exp_avg": torch.zeros(2, 3) - step, "w.step": torch.tensor(float(step))},
    }


def save(
    store: Store,
    step: int,
    state: State | None = None,
    keep: int | Retention = 9,
    provenance: Mapping[str, Any] = PROVENANCE,
    val_loss: float | None = None,
    **options: Any,
) -> str:
    """Commit a snapshot; returns its digest. options: of the writer."""
    retention = Retention(keep) if isinstance(keep, int) else keep
    writer = SnapshotWriter(store, ALONE, retention, provenance, **{"log": print} | options)
    return writer.save(step, state or state_of(step), Metrics(loss=step / 8, val_loss=val_loss))


def read_newest(
    store: Store, say: Callable[[str], None], memory: Store | None = None, newest: NewestDurable | None = None
) -> Loaded | None:
    """Restore the newest snapshot in a world of one, or return None. memory: the hot tier."""
    state = dict[Kind, dict[str, Tensor]]()

    def take(manifest: Manifest) -> Put:
        state["model"], state["optimizer"] = {}, {}
        return lambda kind, tensors: state[kind].update(tensors)

    found = restore(store, memory, ALONE, say, newest or NewestDurable.of(store, {}), take, [0])
    return Loaded(found.manifest, state, found.url) if found else None


def files(folder: Path) -> list[str]:
    """Every file and empty folder below, by relative path; hidden ones too."""
    found = (p for p in folder.rglob("*") if p.is_file() or p.is_symlink() or not any(p.iterdir()))
    return sorted(str(p.relative_to(folder)) for p in found)


def contents(folder: Path) -> dict[str, bytes]:
    """The content of every file below, by relative path."""
    return {name: (folder / name).read_bytes() for name in files(folder)}


def equal(a: Mapping[Kind, Mapping[str, Tensor]], b: Mapping[Kind, Mapping[str, Tensor]]) -> bool:
    """Same kinds, names, dtypes, shapes and bytes."""
    one, other = (
        {kind: {name: (t.dtype, t.shape, raw(t)) for name, t in tensors.items()} for kind, tensors in state.items()}
        for state in (a, b)
    )
    return one == other


def raw(tensor: Tensor) -> bytes:
    """A tensor's bytes."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def canonical(fields: Mapping[str, Any]) -> bytes:
    """Fields as a manifest has them, byte for byte."""
    return json.dumps(fields, sort_keys=True, indent=1, ensure_ascii=False).encode()


def signed(fields: Mapping[str, Any]) -> bytes:
    """A manifest with a right checksum over whatever it says, as an attacker can make it."""
    rest = {k: v for k, v in fields.items() if k != "checksum"}
    return canonical(rest | {"checksum": sha256(canonical(rest)).hexdigest()})


def digest_of(tensors: Mapping[str, Mapping[str, Any]]) -> str:
    """design.md's formula, from a manifest's tensors as JSON."""
    lines = sorted(f"{n} {t['dtype']} {json.dumps(t['shape'])} {t['sha256']}\n" for n, t in tensors.items())
    return sha256("".join(lines).encode()).hexdigest()
