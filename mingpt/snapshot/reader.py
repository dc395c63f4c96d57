"""Reading one snapshot: everything in it is verified while it is read."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from mingpt.errors import Damaged, OtherFormat, UserError
from mingpt.snapshot.format import Kind, Manifest, checked, decode_manifest, decode_part
from mingpt.snapshot.store import Store
from mingpt.storage import place

AT_A_TIME = 4  # parts: hashing and waiting for a store both leave the interpreter to others


@dataclass(frozen=True)
class Loaded:
    """A verified snapshot; its tensors lie in CPU memory."""

    manifest: Manifest
    state: dict[Kind, dict[str, Tensor]]
    url: str  # of the snapshots among which it was


def look(store: Store, step: int) -> Manifest:
    """The manifest, for those who can go on without it. Raises Damaged or OtherFormat."""
    with place(store.key, store.url):
        try:
            manifest = decode_manifest(store.read_manifest(step))
        except FileNotFoundError as error:
            raise Damaged("there is no manifest") from error
    if manifest.step != step:
        raise Damaged(f"the manifest is that of step {manifest.step}")
    return manifest


def read_manifest(store: Store, step: int) -> Manifest:
    """Raises Damaged, or UserError if another version of this program wrote it."""
    try:
        return look(store, step)
    except OtherFormat as error:
        raise UserError(
            f"{store.key}={store.url}: the snapshot of step {step} has {error}: use the version "
            f"that wrote it, or another {'run.dir' if store.key == 'snapshot.dir' else store.key}"
        ) from error


def read(
    store: Store, step: int, kinds: tuple[Kind, ...] = ("model", "optimizer"), manifest: Manifest | None = None
) -> Loaded:
    """Read and verify one snapshot. Raises Damaged, naming the file, or UserError if the store says no.

    manifest: its manifest, if that has been read before.
    """
    manifest = manifest or read_manifest(store, step)
    names = [name for name in sorted(manifest.parts) if name.startswith(kinds)]
    state: dict[Kind, dict[str, Tensor]] = {kind: {} for kind in kinds}
    for name, (_, tensors) in read_parts(store, manifest, names).items():
        state[kind_of(name)] |= tensors
    return Loaded(manifest, state, store.url)


def read_parts(
    store: Store, manifest: Manifest, names: Sequence[str]
) -> dict[str, tuple[memoryview, dict[str, Tensor]]]:
    """Parts of a snapshot, several at a time: for each its bytes and its verified tensors. Raises Damaged."""

    def read_one(name: str) -> tuple[memoryview, dict[str, Tensor]]:
        with place(store.key, store.url):
            raw = store.read_part(manifest.step, name, manifest.parts[name].size)
        return raw, decode_part(manifest, name, raw)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return dict(zip(names, pool.map(read_one, names), strict=True))


def verify(store: Store, step: int) -> Manifest:
    """Read everything of one snapshot and keep nothing, so it may be of any size. Raises as `read`."""
    manifest = read_manifest(store, step)

    def verify_one(name: str) -> None:
        for _ in verified_pieces(store, manifest, name):
            pass

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for _ in pool.map(verify_one, sorted(manifest.parts)):
            pass
    return manifest


def verified_pieces(store: Store, manifest: Manifest, name: str) -> Iterator[memoryview]:
    """A part's bytes, piece by piece. Raises Damaged, at the latest after the last one."""
    with place(store.key, store.url):
        yield from checked(manifest, name, store.read_pieces(manifest.step, name, manifest.parts[name].size))


def kind_of(part: str) -> Kind:
    return "model" if part.startswith("model") else "optimizer"
