"""List and show snapshots from their manifests and file sizes, without reading the parts."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mingpt.config.keys import leaves
from mingpt.console import counted
from mingpt.errors import Damaged, OtherFormat, Unreadable
from mingpt.folder import Folder
from mingpt.redact import as_lines, printable, without_secrets
from mingpt.snapshot.files import SNAPSHOTS, File
from mingpt.snapshot.forking import parent_of
from mingpt.snapshot.format import MANIFEST, Manifest
from mingpt.snapshot.reader import read_manifest
from mingpt.snapshot.store import Store

VOCABULARY_SHOWN = 1000  # characters; all of GPT-2's would fill two hundred screens
GOOD, DAMAGED, INCOMPLETE, ASIDE, OTHER = "looks good", "DAMAGED", "incomplete", "set aside", "other format"


@dataclass(frozen=True)
class Entry:
    """One step's folder. None: the store does not report it, or no good manifest holds it."""

    step: int
    state: str
    problem: str = ""
    age_seconds: float | None = None
    bytes: int | None = None
    parts: int | None = None
    digest: str | None = None
    loss: float | None = None
    val_loss: float | None = None
    not_finite: tuple[str, ...] = ()  # losses that were NaN or infinite
    attempt: int | None = None
    world_size: int | None = None


def inspect_step(store: Store, step: int) -> Entry:
    """Read the manifest and compare the parts' sizes. So `looks good` is no proof: only `verify` reads the parts."""
    files = store.files(step)
    size = None if any(f.size is None for f in files) else sum(f.size or 0 for f in files)
    age = _age_seconds(files)
    try:
        manifest = read_manifest(store, step)
        _check_sizes(store, manifest, {f.name: f.size for f in files})
    except OtherFormat as error:
        return Entry(step, OTHER, str(error.__cause__), age, size)  # the cause leaves out the place
    except (Damaged, Unreadable) as error:
        if any(f.name == MANIFEST for f in files):
            return Entry(step, DAMAGED, str(error), age, size)
        if aside := [f for f in files if f.is_set_aside]:
            why = "was damaged" if aside[0].was_damaged else "was rewound or overtaken"
            return Entry(step, ASIDE, f"{why}; its manifest is now {aside[0].name}", age, size)
        return Entry(step, INCOMPLETE, "there is no manifest: it is being written, or its writer died", age, size)
    last = manifest.history[-1] if manifest.history else {}
    return Entry(
        step=step,
        state=GOOD,
        age_seconds=age,
        bytes=sum(part.size for part in manifest.parts.values()),
        parts=len(manifest.parts),
        digest=manifest.digest,
        loss=manifest.metrics.loss,
        val_loss=manifest.metrics.val_loss,
        not_finite=tuple(manifest.metrics.not_finite),
        attempt=last.get("attempt"),
        world_size=last.get("world_size"),
    )


def _age_seconds(files: list[File]) -> float | None:
    """Seconds since the commit; without a commit, since the last write."""
    times = [f.modified for f in files if f.name == MANIFEST] or [f.modified for f in files]
    known = [t for t in times if t is not None]
    return max(0.0, time.time() - max(known)) if known else None


def _check_sizes(store: Store, manifest: Manifest, listed: dict[str, int | None]) -> None:
    """Raises Damaged. A web server's listing has no sizes, or no files: then each file is asked for."""
    with store.named_errors():
        for name, part in manifest.parts.items():
            try:
                size = listed.get(name) or store.size(manifest.step, name)
            except FileNotFoundError as error:
                raise Damaged(f"{name} is missing") from error
            if size != part.size:
                raise Damaged(f"{name} has {size} bytes in place of {part.size}")


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, each cell as wide as the widest of its column."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def _size(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 / 10 else f"{count / 2**10:.1f} KiB"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _loss(e: Entry, name: str) -> str:
    return "nan" if name in e.not_finite else _number(getattr(e, name))


def _row(e: Entry) -> tuple[str, ...]:
    state = f"{e.state}: {e.problem}" if e.problem else e.state
    digest = e.digest[:16] if e.digest else "-"
    return str(e.step), _age(e.age_seconds), _size(e.bytes), digest, _loss(e, "loss"), _loss(e, "val_loss"), state


def runs_below(url: str) -> list[tuple[str, Entry]]:
    """The runs in a folder: name and newest step of each."""
    found = []
    for name in Folder(url, "URL").subfolders():
        store = Store(f"{url.rstrip('/')}/{name}/{SNAPSHOTS}", "URL")
        if steps := store.steps():
            found.append((name, inspect_step(store, steps[0])))
    return found


def runs_table(runs: Sequence[tuple[str, Entry]]) -> str:
    rows = [(printable(name), *_row(entry)) for name, entry in runs]
    return as_lines(columns([("run", "step", "age", "size", "digest", "loss", "val_loss", "state"), *rows]))


def steps_table(entries: Iterable[Entry]) -> str:
    return as_lines(columns([("step", "age", "size", "digest", "loss", "val_loss", "state"), *map(_row, entries)]))


def render_manifest(m: Manifest) -> str:
    """A manifest as text for people, without the list of tensors."""
    lines = [f"run {m.run}, step {m.step}, format {m.format}", f"digest {m.digest}"]
    lines.append(f"loss {_number(m.metrics.loss)}, validation loss {_number(m.metrics.val_loss)}")
    for kind in ("model", "optimizer"):
        parts = [part.size for name, part in m.parts.items() if name.startswith(kind)]
        tensors = sum(t.part.startswith(kind) for t in m.tensors.values())
        lines.append(f"{kind}: {_size(sum(parts))} in {counted(len(parts), 'part')}, {counted(tensors, 'tensor')}")
    vocabulary = json.dumps(m.vocabulary, ensure_ascii=False)
    if len(vocabulary) > VOCABULARY_SHOWN:
        vocabulary = f"{vocabulary[:VOCABULARY_SHOWN]}… ({len(vocabulary):,} characters)"
    lines += [f"vocabulary: {vocabulary}", "", "attempts:"]
    keys = ("attempt", "from_step", "world_size", "at")
    lines += columns([keys, *(tuple(str(a.get(k, "-")) for k in keys) for a in m.history)])
    if parent := parent_of(m):
        lines.append(f"forked from step {parent.step} of {parent.run} ({parent.dir}), digest {parent.digest}")
    lines += [
        f"attempt {a.get('attempt')} changed {key}: {' -> '.join(json.dumps(v, ensure_ascii=False) for v in values)}"
        for a in m.history
        for key, values in _changes(a)
    ]
    for title, section in (("numerics", m.fingerprint), ("config", without_secrets(m.config))):
        lines += ["", f"{title}:"]
        lines += [f"  {key}={json.dumps(value, ensure_ascii=False)}" for key, value in leaves(section)]
    return as_lines(lines)


def _changes(attempt: dict[str, object]) -> list[tuple[str, list[object]]]:
    """Settings that an attempt changed, with both values. The format does not check what a history's entry holds."""
    changes = attempt.get("changes")
    return [(k, v) for k, v in changes.items() if isinstance(v, list)] if isinstance(changes, dict) else []
