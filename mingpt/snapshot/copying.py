"""Copy snapshots from one store to another: verified while read, parts first, manifest last, nothing overwritten."""

from collections.abc import Callable

from mingpt.errors import Mistake
from mingpt.snapshot.format import Damaged, Manifest, decode_part, encode_manifest
from mingpt.snapshot.reader import read_manifest
from mingpt.snapshot.store import Store
from mingpt.storage import place


def refuse_others(source: Store, target: Store, steps: list[int]) -> None:
    """Raise Mistake, before anything is written, if the target has one of the steps with another content."""
    there = set(target.steps())
    problems = []
    for step in steps:
        if step not in there:
            continue
        try:
            theirs = read_manifest(target, step).digest
        except Damaged as damage:
            problems.append(f"{target.url}: step {step} is there already, and damaged ({damage}): delete it first")
            continue
        try:
            ours = read_manifest(source, step).digest
        except Damaged:
            continue  # will be told when it is read
        if theirs != ours:
            problems.append(
                f"{target.url}: step {step} is there already with another digest ({theirs[:16]}, not {ours[:16]}): "
                f"it stays; copy to another place, or delete it first"
            )
    if problems:
        raise Mistake(*problems)


def copy_step(source: Store, target: Store, step: int, say: Callable[[str], None]) -> None:
    """Copy one snapshot. Raises Damaged if the source is; then the target has parts at most, and no manifest."""
    manifest = read_manifest(source, step)
    if _is_there(target, manifest):
        say(f"step {step}: is there already, digest {manifest.digest}")
        return
    for name, part in sorted(manifest.parts.items()):
        with place(source.key, source.url):
            raw = source.read_part(step, name, part.size)
        decode_part(manifest, name, raw)  # for its checks
        with place(target.key, target.url):
            target.write(step, name, [raw])
            if (size := target.size(step, name)) != part.size:
                raise Mistake(f"{target.url}: {name} has {size} bytes in place of {part.size} after it was written")
    with place(target.key, target.url):
        committed = target.commit(step, encode_manifest(manifest))
    if not committed and read_manifest(target, step).digest != manifest.digest:
        raise Mistake(f"{target.url}: another process has written another snapshot of step {step} meanwhile: it stays")
    say(f"step {step}: copied to {target.folder_url(step)}, digest {manifest.digest}")


def _is_there(target: Store, manifest: Manifest) -> bool:
    """Whether the same state is committed with parts of the right sizes; if some are not, writing them repairs it."""
    try:
        theirs = read_manifest(target, manifest.step)
    except Damaged:
        return False
    with place(target.key, target.url):
        try:
            return all(target.size(manifest.step, name) == part.size for name, part in theirs.parts.items())
        except FileNotFoundError:
            return False
