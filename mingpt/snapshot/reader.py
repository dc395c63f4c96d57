"""Read one snapshot and verify all of it on the way."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from mingpt.errors import Damaged, OtherFormat, Unreadable
from mingpt.snapshot.format import Kind, Manifest, decode_part, verified
from mingpt.snapshot.manifest import decode_manifest
from mingpt.snapshot.store import Store

Part = tuple[memoryview, dict[str, Tensor]]  # its bytes, and its tensors, which share their memory
PARALLEL_PARTS = 4  # hashing and waiting for a store both release the GIL


@dataclass(frozen=True)
class Loaded:
    """A verified snapshot with its tensors in CPU memory. url: of the store that it came from, without secrets."""

    manifest: Manifest
    state: dict[Kind, dict[str, Tensor]]
    url: str


def read_manifest(store: Store, step: int) -> Manifest:
    """Raises Damaged, OtherFormat, Unreadable, or what `place` makes of the store's error."""
    with store.named_errors():
        try:
            manifest = decode_manifest(store.read_manifest(step))
        except FileNotFoundError as error:
            raise Damaged("there is no manifest") from error
        except OtherFormat as error:
            raise OtherFormat(
                f"{store.shown}: the snapshot of step {step} has {error}: use the version "
                f"that wrote it, or another {'run.dir' if store.key == 'snapshot.dir' else store.key}"
            ) from error
    if manifest.step != step:
        raise Damaged(f"the manifest is that of step {manifest.step}")
    return manifest


def manifest_or_none(store: Store, step: int) -> Manifest | None:
    """The manifest, or None if it is bad. Whoever then reads the snapshot reports what is wrong."""
    try:
        return read_manifest(store, step)
    except (Damaged, OtherFormat, Unreadable):
        return None


def read(
    store: Store, step: int, kinds: tuple[Kind, ...] = ("model", "optimizer"), manifest: Manifest | None = None
) -> Loaded:
    """Read and verify one snapshot. Raises Damaged, which names the file, and as `read_manifest`.

    manifest: the snapshot's manifest, if the caller has read it already.
    """
    manifest = manifest or read_manifest(store, step)
    names = [name for name in sorted(manifest.parts) if name.startswith(kinds)]
    state: dict[Kind, dict[str, Tensor]] = {kind: {} for kind in kinds}
    for name, (_, tensors) in read_parts(store, manifest, names):
        state[kind_of(name)] |= tensors
    return Loaded(manifest, state, store.url)


def read_parts(
    store: Store, manifest: Manifest, names: Sequence[str], ahead: int = PARALLEL_PARTS
) -> Iterator[tuple[str, Part]]:
    """Read and verify parts, `ahead` of them in parallel, and so at a time in memory. Raises Damaged."""

    def read_one(name: str) -> Part:
        with store.named_errors():
            raw = store.read_part(manifest.step, name, manifest.parts[name].size)
        return raw, decode_part(manifest, name, raw)

    with ThreadPoolExecutor(ahead) as pool:
        pending = deque[tuple[str, Future[Part]]]()
        for name in names:
            pending.append((name, pool.submit(read_one, name)))
            if len(pending) == ahead:
                first, reading = pending.popleft()
                yield first, reading.result()
        for last, reading in pending:
            yield last, reading.result()


def verify(store: Store, step: int) -> Manifest:
    """Read all of one snapshot as a stream, so it may be larger than memory. Raises as `read`."""
    manifest = read_manifest(store, step)

    def verify_one(name: str) -> None:
        for _ in verified_pieces(store, manifest, name):
            pass

    with ThreadPoolExecutor(PARALLEL_PARTS) as pool:
        for _ in pool.map(verify_one, sorted(manifest.parts)):
            pass
    return manifest


def verified_pieces(store: Store, manifest: Manifest, name: str) -> Iterator[memoryview]:
    """A part's bytes, piece by piece. Raises Damaged, at the latest after the last piece."""
    with store.named_errors():
        yield from verified(manifest, name, store.read_pieces(manifest.step, name, manifest.parts[name].size))


def kind_of(part: str) -> Kind:
    return "model" if part.startswith("model") else "optimizer"
