"""Copy snapshots from one store to another: verify while reading, write the manifest last, replace nothing good."""

from collections.abc import Callable

from mingpt.errors import Damaged, UserError
from mingpt.redact import printable
from mingpt.snapshot.files import METRICS, SNAPSHOTS
from mingpt.snapshot.format import Manifest
from mingpt.snapshot.manifest import encode_manifest
from mingpt.snapshot.reader import manifest_or_none, read_manifest, verified_pieces, verify
from mingpt.snapshot.store import Store


def check_conflicts(source: Store, target: Store, steps: list[int]) -> None:
    """Raise UserError if the target has one of the steps with another digest. Call before anything is written."""
    existing = set(target.steps())
    problems = []
    for step in steps:
        if step not in existing:
            continue
        try:
            theirs = read_manifest(target, step).digest
        except Damaged as damage:
            problems.append(f"{target.url}: step {step} is there already, and damaged ({damage}): delete it first")
            continue
        try:
            ours = read_manifest(source, step).digest
        except Damaged:
            continue  # copy_step will report it
        if theirs != ours:
            problems.append(
                f"{target.url}: step {step} is there already with another digest ({theirs[:16]}, not {ours[:16]}): "
                f"it stays; copy to another place, or delete it first"
            )
    if problems:
        raise UserError(*problems)


def check_same_run(source: Store, target: Store) -> None:
    """Raise UserError if the target has a step of another run: a run there would be made of both."""
    ours = [manifest for step in source.steps() if (manifest := manifest_or_none(source, step))]
    for step in target.steps() if ours else []:
        theirs = manifest_or_none(target, step)
        if theirs and not any(_continues(mine, theirs) for mine in ours):
            runs = printable(f"{theirs.run}, not {ours[0].run}")
            raise UserError(
                f"{target.url}: step {step} is there, of another run ({runs}): nothing was copied; give another TO"
            )


def _continues(newer: Manifest, older: Manifest) -> bool:
    """Whether one line of attempts leads through both. One attempt has one config."""
    attempts = len(older.history)
    return older.history == newer.history[:attempts] and (attempts < len(newer.history) or older.config == newer.config)


def copy_step(source: Store, target: Store, step: int, log: Callable[[str], None]) -> None:
    """Copy one snapshot. Raises Damaged if the source is damaged; the target then has no manifest."""
    manifest = read_manifest(source, step)
    if _has_good_copy(target, manifest):
        log(f"step {step}: is there already, digest {manifest.digest}")
        return
    for name in sorted(manifest.parts):
        copy_part(source, target, manifest, name)
    with target.named_errors():
        committed = target.commit(step, encode_manifest(manifest))
    if not committed and read_manifest(target, step).digest != manifest.digest:
        raise UserError(
            f"{target.url}: another process has meanwhile written another snapshot of step {step}: it stays; copy to "
            f"another place, or delete it first"
        )
    log(f"step {step}: copied to {target.folder_url(step)}, digest {manifest.digest}")


def copy_part(source: Store, target: Store, manifest: Manifest, name: str) -> None:
    """Read a part, verify it on the way, and write it. Raises Damaged."""
    step, expected = manifest.step, manifest.parts[name].size
    with target.named_errors():
        pieces = verified_pieces(source, manifest, name)  # each is valid until the next
        target.write_part(step, name, pieces if target.local else [bytes(piece) for piece in pieces])
        if (size := target.size(step, name)) != expected:
            raise UserError(f"{target.url}: {name} has {size} bytes in place of {expected} after it was written")


def _has_good_copy(target: Store, manifest: Manifest) -> bool:
    """Whether the target has the same state, undamaged. If it is damaged, copying again repairs it."""
    try:
        return verify(target, manifest.step).digest == manifest.digest
    except Damaged:
        return False


def copy_metrics(source: Store, target: Store, log: Callable[[str], None]) -> None:
    """Copy a run's metrics, so that its curves and attempt numbers continue. Existing files stay.

    Does nothing unless both stores are the snapshots folder of a run.
    """
    if not all(store.root.endswith(f"/{SNAPSHOTS}") for store in (source, target)):
        return
    ours, theirs = (Store(store.given.removesuffix(SNAPSHOTS) + METRICS, store.key) for store in (source, target))
    existing = {file.name for file in theirs.files(None)}
    for file in ours.files(None):
        if file.name in existing or not file.name.endswith(".jsonl"):
            continue
        with ours.named_errors():
            try:
                size = ours.size(None, file.name)
                pieces = [bytes(piece) for piece in ours.read_pieces(None, file.name, size)]
            except Damaged as damage:
                raise UserError(f"{ours.url}: {damage}: remove it") from damage
        theirs.write(file.name, b"".join(pieces))
        log(f"metrics/{file.name}: copied")
