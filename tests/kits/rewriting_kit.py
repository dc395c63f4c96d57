"""Changes a snapshot with a manifest that fits, as somebody who wants to deceive would."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from mingpt.snapshot.format import Kind, PartInfo, digest_of, encode_part, lay_out
from mingpt.snapshot.manifest import encode_manifest
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store


def rewrite(store: Store, step: int, change: Callable[[dict[Kind, dict[str, Tensor]]], object]) -> None:
    """Change the tensors of a step's snapshot; its checksums and digest then fit them."""
    loaded = read(store, step)
    change(loaded.state)
    parts = [encode_part(part, loaded.state[part.kind]) for part in lay_out(loaded.state)]
    tensors = {name: info for part in parts for name, info in part.tensors.items()}
    new = {"parts": {p.name: PartInfo(size=p.size) for p in parts}, "tensors": tensors, "digest": digest_of(tensors)}
    for old in Path(store.folder(step)).glob("*.safetensors"):
        old.unlink()
    for part in parts:
        Path(store.folder(step), part.name).write_bytes(b"".join(part.pieces))
    manifest = loaded.manifest.model_copy(update=new)
    Path(store.folder(step), "manifest.json").write_bytes(encode_manifest(manifest))
