"""Find snapshots, read one and verify all of it on the way."""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from mingpt.errors import Damaged, OtherFormat, SnapshotFailed, Unreadable, UserError
from mingpt.files.folder import Folder
from mingpt.files.localfile import Buffer, T
from mingpt.snapshot.attempts import newest_number
from mingpt.snapshot.elsewhere import look_elsewhere
from mingpt.snapshot.format import MANIFEST, EncodedPart, Kind, Manifest, decode_part, verified
from mingpt.snapshot.manifest import decode_manifest
from mingpt.snapshot.store import SNAPSHOTS, STEP_FOLDER, Store

ReadPart = tuple[memoryview, dict[str, Tensor]]  # its bytes, and its tensors, which share their memory
Seen = dict[int, tuple[float | None, Any]]  # by step: a validation loss, and what it was measured on
BEST = "best"  # RUN@best: the snapshot with the lowest validation loss
PARALLEL_PARTS = 4  # hashing and waiting for a store both release the GIL


@dataclass(frozen=True)
class Loaded:
    """A verified snapshot with its tensors in CPU memory. url: of the store that it came from, without secrets."""

    manifest: Manifest
    state: dict[Kind, dict[str, Tensor]]
    url: str


def read_manifest(store: Store, step: int, name: str = MANIFEST) -> Manifest:
    """name: of a manifest that was set aside. Raises Damaged, OtherFormat, Unreadable, or what `place` makes of the
    store's error.
    """
    with store.named_errors():
        try:
            manifest = _twice(store, lambda file: decode_manifest(store.read_manifest(step, file)), name)
        except OtherFormat as error:
            raise OtherFormat(
                f"{store.shown}: the snapshot of step {step} has {error}: use the version "
                f"that wrote it, or another {'run.dir' if store.key == 'snapshot.dir' else store.key}"
            ) from error
    if manifest.step != step:
        raise Damaged(f"the manifest is that of step {manifest.step}")
    return manifest


def _twice(store: Store, read: Callable[[str], T], name: str) -> T:
    """What comes from a store damaged is read once more: a bit may have flipped on the way."""
    if not store.local:
        with suppress(Damaged):
            return read(name)
    return read(name)


def manifest_or_none(store: Store, step: int) -> Manifest | None:
    """The manifest, or None if it is bad. Whoever then reads the snapshot reports what is wrong."""
    try:
        return read_manifest(store, step)
    except (Damaged, OtherFormat, Unreadable):
        return None


def read(store: Store, step: int) -> Loaded:
    """Read and verify one snapshot. Raises Damaged, which names the file, and as `read_manifest`."""
    manifest = read_manifest(store, step)
    state: dict[Kind, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    for name, (_, tensors) in read_parts(store, manifest, sorted(manifest.parts)):
        state[kind_of(name)] |= tensors
    return Loaded(manifest, state, store.url)


def read_parts(
    store: Store, manifest: Manifest, names: Sequence[str], ahead: int = PARALLEL_PARTS
) -> Generator[tuple[str, ReadPart]]:
    """Read and verify parts, `ahead` of them in parallel, and so at a time in memory. Raises Damaged."""

    def read_one(name: str) -> ReadPart:
        with store.named_errors():
            raw = store.read_part(manifest.step, name, manifest.parts[name].size)
        return raw, decode_part(manifest, name, raw)

    # A part is handed out while the next ones are read. Not `pool.map`, which would begin all of them at once, and hold
    # the whole snapshot in memory.
    with ThreadPoolExecutor(ahead) as pool:
        pending = deque[tuple[str, Future[ReadPart]]]()
        for name in names:
            pending.append((name, pool.submit(_twice, store, read_one, name)))
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
        for _ in pool.map(partial(_twice, store, verify_one), sorted(manifest.parts)):
            pass
    return manifest


def verified_pieces(store: Store, manifest: Manifest, name: str) -> Iterator[memoryview]:
    """A part's bytes, piece by piece. Raises Damaged, at the latest after the last piece."""
    size = manifest.parts[name].size
    with store.named_errors():
        yield from verified(name, size, manifest.tensors_by_part[name], store.read_pieces(manifest.step, name, size))


def read_back(store: Store, step: int, part: EncodedPart) -> None:
    """Read a part that was just written. Raises SnapshotFailed unless its bytes are those that it should have."""
    with damage_as(SnapshotFailed, store, step, ", when it was read back after it was written"):
        for _ in verified(part.name, part.size, part.tensors, store.read_pieces(step, part.name, part.size)):
            pass


def kind_of(part: str) -> Kind:
    return "model" if part.startswith("model") else "optimizer"


# Under a URL that a user gives: RUN, RUN@STEP, a run's snapshots folder, or a step's folder


@dataclass(frozen=True)
class Found:
    """A store and the steps that were asked for, newest first."""

    store: Store
    steps: list[int]


def val_losses(store: Store, steps: Sequence[int], seen: Seen) -> dict[int, float | None]:
    """The validation losses of the snapshots that can be read, by step; None: not measured as the newest's was.

    steps: newest first. seen: of manifests that were read before; this call adds to it.
    """
    losses, measured_on = dict[int, float | None](), None
    for step in steps:
        if step not in seen and (manifest := manifest_or_none(store, step)):
            seen[step] = manifest.metrics.val_loss, manifest.validated_on
        if step in seen:
            loss, on = seen[step]
            measured_on = measured_on or on
            # Losses on other samples can't be compared.
            losses[step] = loss if on == measured_on else None
    return losses


def best_of(losses: Mapping[int, float | None]) -> int | None:
    """The step with the lowest loss, of equal ones the oldest. None: nothing was measured."""
    # A NaN would be the smallest, or not, by the order of steps.
    measured = [(loss, step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return min(measured)[1] if measured else None


def best_step(found: Found) -> int | None:
    """The step with the lowest validation loss, of equal ones the oldest, among those measured as the newest's was."""
    return best_of(val_losses(found.store, found.steps, {}))


def split_url(url: str) -> tuple[str, int | None]:
    """The URL without the step that it names as `RUN@12000`, `RUN@best` or as a step's folder, and that step; else
    None. Raises UserError if there is no best one.
    """
    above, _, step = url.rpartition("@")
    if above and step == BEST:
        if (best := best_step(find(above))) is None:
            raise UserError(f"{url}: no snapshot there has a validation loss: choose a step")
        return above, best
    return (above, int(step)) if above and step.isascii() and step.isdecimal() else _split_folder(url)


def _split_folder(url: str) -> tuple[str, int | None]:
    parent, _, last = url.rstrip("/").rpartition("/")
    named = STEP_FOLDER.fullmatch(last)
    return (parent or ("/" if url.startswith("/") else "."), int(named[1])) if named else (url, None)


def run_dir_of(url: str) -> str:
    """The run's directory, of which the snapshots folder or a step's folder may be given.

    Raises UserError for RUN@STEP: what asks for it is about the whole run.
    """
    if split_url(url) != _split_folder(url):
        raise UserError(f"{url} names one step: give the run's directory")
    above = _split_folder(url)[0].rstrip("/") or "/"
    parent, _, last = above.rpartition("/")
    return (parent or ("/" if "/" in above else ".")) if last == SNAPSHOTS else above


def find(url: str, step: int | None = None, committed: bool = True) -> Found:
    """The snapshots under a URL, or that of `step` alone. committed=False: also folders without a manifest.

    Raises UserError if there are none, or not that of `step`.
    """
    above, named = split_url(url)
    if None not in (named, step) and named != step:
        raise UserError(f"{url} names step {named}, and --step {step}: leave out one")
    url, step = above, step if named is None else named
    # The snapshots folder itself first: a run's directory has no folders of steps.
    for below in ("", "/snapshots"):
        store = Store(url.rstrip("/") + below if below else url, "URL")
        if steps := store.steps() if committed else store.folders():
            break
    else:
        look_elsewhere(run_dir_of(url), None)
        cure = "check the spelling; give a run's directory, its snapshots folder, or a step's folder"
        if any(store.steps() for _, store in runs_below(url)):
            cure = f"`mingpt snapshots list {url}` shows the runs in there: give one of them"
        if newest_number(run_dir_of(url)):
            raise UserError(f"{url}: no snapshot yet: wait for the run's first one, or give its snapshot.dir")
        raise UserError(f"{url}: no snapshot is there: {cure}")
    look_elsewhere(run_dir_of(url), steps[0])
    if step is not None:
        if step not in steps:
            raise UserError(f"{store.url}: no snapshot of step {step}; there are {', '.join(map(str, sorted(steps)))}")
        steps = [step]
    return Found(store, steps)


def runs_below(url: str) -> Iterator[tuple[str, Store]]:
    """The folders in a folder: name, and the snapshots in there if it is a run's."""
    for name in Folder(url, "URL").subfolders():
        yield name, Store(f"{url.rstrip('/')}/{name}/{SNAPSHOTS}", "URL")


@contextmanager
def damage_as(kind: type[Exception], store: Store, step: int, cure: str = "") -> Iterator[None]:
    """Raise Damaged as an error of this kind, which names the snapshot's folder and ends with what to do."""
    try:
        yield
    except Damaged as damage:
        raise kind(f"{store.folder_url(step)}: {damage}{cure}") from damage


def copy_part(source: Store, target: Store, manifest: Manifest, name: str) -> None:
    """Read a part, verify it on the way, and write it to another store. Raises Damaged."""
    with target.named_errors():
        pieces: Iterable[Buffer] = verified_pieces(source, manifest, name)
        if not target.local:
            # A bucket's upload takes all of them at a time, and each is valid only until the next one is read.
            pieces = [bytes(piece) for piece in pieces]
        target.write_part(manifest.step, name, pieces)
        try:
            target.check_size(manifest.step, name, manifest.parts[name].size)
        except Damaged as problem:
            raise UserError(f"{target.url}: {problem} after it was written") from problem
