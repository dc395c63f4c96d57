"""`python -m mingpt.snapshots list|verify|digest URL`: look at the snapshots of a run.

URL is a run's directory, its snapshots folder, or one step's folder; any fsspec URL.
"""

import sys
from dataclasses import dataclass

from mingpt.cli import Parser
from mingpt.config import without_secrets
from mingpt.errors import CRASHED, MISTAKE, Mistake, Unavailable
from mingpt.snapshot.format import Damaged, Manifest
from mingpt.snapshot.reader import read, read_manifest
from mingpt.snapshot.store import STEP_FOLDER, Store


@dataclass(frozen=True)
class Found:
    """A store and its committed steps of interest, newest first."""

    store: Store
    steps: list[int]


def find(url: str, step: int | None = None) -> Found:
    """The snapshots under a URL. Raises Mistake if there are none, or not the wanted one."""
    parent, _, last = url.rstrip("/").rpartition("/")
    if named := STEP_FOLDER.fullmatch(last):
        url, step = parent, int(named[1])
    for place in (url, f"{url.rstrip('/')}/snapshots"):
        store = Store(place, "URL")
        if steps := store.steps():
            break
    else:
        cure = "give a run's directory, its snapshots folder, or a step's folder"
        raise Mistake(f"{without_secrets(url)}: no snapshot is there: {cure}")
    if step is not None:
        if step not in steps:
            raise Mistake(f"{store.url}: no snapshot of step {step}; there are {', '.join(map(str, sorted(steps)))}")
        steps = [step]
    return Found(store, steps)


def table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _sizes(manifest: Manifest) -> str:
    total = sum(part.size for part in manifest.parts.values())
    return f"{total / 2**20:.1f} MiB in {len(manifest.parts)}"


def list_command(found: Found) -> int:
    """A table of the manifests; the parts are not read. Exit code 1 if a manifest is damaged."""
    rows: list[tuple[str, ...]] = [("step", "digest", "parts", "processes", "written by")]
    bad = 0
    for step in found.steps:
        try:
            m = read_manifest(found.store, step)
            last = m.history[-1] if m.history else {}
            by = f"attempt {last.get('attempt')} of {last.get('at')}"
            rows.append((str(step), m.digest[:16], _sizes(m), str(last.get("world_size")), by))
        except Damaged as damage:
            bad = 1
            rows.append((str(step), "DAMAGED", str(damage), "", ""))
    print(table(rows))
    return bad


def verify_command(found: Found) -> int:
    """Read everything and compare it with the checksums. Exit code 1 if anything is damaged."""
    bad = 0
    for step in found.steps:
        try:
            print(f"step {step}: good, digest {read(found.store, step).manifest.digest}")
        except Damaged as damage:
            bad = 1
            print(f"step {step}: DAMAGED: {found.store.folder(step)}: {damage}")
    return bad


def digest_command(found: Found) -> int:
    """The digest of the newest snapshot (or of --step) alone on stdout, after verifying it."""
    try:
        print(read(found.store, found.steps[0]).manifest.digest)
    except Damaged as damage:
        print(f"error: {found.store.folder(found.steps[0])}: {damage}", file=sys.stderr)
        return 1
    return 0


COMMANDS = {"list": list_command, "verify": verify_command, "digest": digest_command}


def main(arguments: list[str]) -> int:
    parser = Parser(prog="python -m mingpt.snapshots", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("url", metavar="URL")
    parser.add_argument("--step", type=int, help="one step instead of all (digest: instead of the newest)")
    options = parser.parse_args(arguments)
    try:
        return COMMANDS[options.command](find(options.url, options.step))
    except Mistake as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return MISTAKE
    except Unavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return CRASHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
