"""What `mingpt snapshots` does: one function a command (`export`, for which torch's models are imported: export.py)."""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from pydantic import ValidationError

from mingpt.cli.command import Unfit
from mingpt.cli.console import as_lines, columns, counted, printable, say, say_json
from mingpt.config.keys import declared, leaves
from mingpt.config.schema import Schedule, Snapshot
from mingpt.errors import OF_ONE, Damaged, OtherFormat, Unreadable, UserError
from mingpt.report.runs import UNREADABLE, listed, table
from mingpt.snapshot.attempts import parent_of
from mingpt.snapshot.elsewhere import look_elsewhere
from mingpt.snapshot.format import MANIFEST, Manifest
from mingpt.snapshot.reader import (
    BEST,
    Found,
    best_step,
    damage_as,
    find,
    read_manifest,
    run_dir_of,
    runs_below,
    split_url,
    verify,
)
from mingpt.snapshot.retention import DAY, Retention, plan
from mingpt.snapshot.store import SNAPSHOTS, File, Store
from mingpt.tiers.rewinding import rewind, undo

Options = argparse.Namespace
VOCABULARY_SHOWN = 1000  # characters; all of GPT-2's would fill two hundred screens
TITLES = ("step", "age", "size", "digest", "loss", "val_loss", "state")
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
    best: bool = False


def _inspect(store: Store, step: int) -> Entry:
    """Read the manifest and compare the parts' sizes. So `looks good` is no proof: only `verify` reads the parts."""
    files = store.files(step)
    size = None if any(f.size is None for f in files) else sum(f.size or 0 for f in files)
    age = _age_seconds(files)
    try:
        manifest = read_manifest(store, step)
        with store.named_errors():
            store.check_sizes(step, manifest.sizes)
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
        bytes=sum(manifest.sizes.values()),
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


def _row(e: Entry) -> tuple[str, ...]:
    state = f"{e.state}: {e.problem}" if e.problem else f"{e.state}, {BEST}" if e.best else e.state
    losses = ["nan" if name in e.not_finite else _number(getattr(e, name)) for name in ("loss", "val_loss")]
    return str(e.step), _age(e.age_seconds), _size(e.bytes), e.digest[:16] if e.digest else "-", *losses, state


def _rendered(m: Manifest) -> str:
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
    for title, section in (("numerics", m.fingerprint), ("config", m.config)):
        lines += ["", f"{title}:"]
        lines += [f"  {key}={json.dumps(value, ensure_ascii=False)}" for key, value in leaves(section)]
    return as_lines(lines)


def _changes(attempt: dict[str, object]) -> list[tuple[str, list[object]]]:
    """Settings that an attempt changed, with both values. The format does not check what a history's entry holds."""
    changes = attempt.get("changes")
    return [(k, v) for k, v in changes.items() if isinstance(v, list)] if isinstance(changes, dict) else []


def list_command(options: Options) -> int:
    runs = dict[str, Entry]()
    try:
        found = find(options.url, options.step, committed=False)
        entries = [_inspect(found.store, step) for step in found.steps]
        best = best_step(found) if len(entries) > 1 else None
        entries = [replace(e, best=e.step == best) for e in entries]
    except UserError:
        if options.step is None:  # a folder of runs?
            found_runs = ((name, _newest(below)) for name, below in runs_below(options.url))
            runs = {name: entry for name, entry in found_runs if entry}
        if not runs:
            raise
        entries = [*runs.values()]
    if options.json:
        say_json({name: asdict(e) for name, e in runs.items()} or [asdict(e) for e in entries])
    elif runs:
        rows = listed(options.url)  # opens each run's history, which `--json` does without
        said = {row["run"] for row in rows if row["state"] == UNREADABLE}  # by a line of its own
        bad = [f"{n}: newest snapshot: {e.state}: {e.problem}" for n, e in runs.items() if e.problem and n not in said]
        say("\n".join([table(rows), *map(printable, bad)]))
    else:
        say(as_lines(columns([TITLES, *map(_row, entries)])))
    return int(any(e.state == DAMAGED for e in entries))


def _newest(store: Store) -> Entry | None:
    """The newest snapshot of a run, one of many; None: there is no snapshot."""
    try:
        if not (steps := store.steps()):
            return None
        look_elsewhere(store.run_dir, steps[0])
        return _inspect(store, steps[0])
    except OF_ONE as error:
        return Entry(0, DAMAGED, str(error))  # its step is not known


def verify_command(options: Options) -> int:
    found = find(options.url, options.step)

    def verify_one(step: int) -> None:
        say(f"step {step}: good, digest {verify(found.store, step).digest}")

    return _each_step(found, verify_one, "DAMAGED", "not verified")


def _each_step(found: Found, act: Callable[[int], None], damaged: str, undone: str) -> int:
    """Act on the steps, newest first, so an interrupted command has done the most useful ones. 1 if one is damaged.

    A step of another format is skipped. Its OtherFormat is raised at the end, unless a step was damaged.
    """
    code, other = 0, None
    for step in found.steps:
        try:
            act(step)
        except (Damaged, Unreadable) as error:
            code = 1
            say(f"step {step}: {damaged}: {found.store.folder_url(step)}: {error}")
        except OtherFormat as error:
            other = other or error
            say(f"step {step}: of another format, {undone}")
    if other and not code:
        raise other
    return code


def digest_command(options: Options) -> int:
    found = find(options.url, options.step)
    with damage_as(Unfit, found.store, found.steps[0]):
        say(verify(found.store, found.steps[0]).digest)
    return 0


def show_command(options: Options) -> int:
    found = find(options.url, options.step)
    with damage_as(Unfit, found.store, found.steps[0]):
        manifest = read_manifest(found.store, found.steps[0])
    say_json(manifest.model_dump()) if options.json else say(_rendered(manifest))
    return 0


def prune_command(options: Options) -> int:
    if split_url(options.url)[1] is not None:
        raise UserError(f"{options.url} names one step: give the run's directory")
    found = find(options.url)
    store, newest = found.store, found.steps[0]
    with damage_as(Unfit, store, newest, ": nothing was deleted, since older ones may be needed"):
        manifest = verify(store, newest)
    given = {"keep": options.keep, "keep_every": options.keep_every, "keep_best": options.keep_best}
    own = manifest.config.get("snapshot") or {}
    try:
        settings = Snapshot.model_validate({k: own[k] for k in given if k in own}).model_dump()
        schedule = Schedule(**declared("schedule", manifest.config))
    except (ValidationError, TypeError) as error:
        raise UserError(f"{store.folder_url(newest)}: its config does not say what to keep: give --keep") from error
    settings = {k: settings[k] if value is None else value for k, value in given.items()}
    retention = Retention(**settings, orphan_age=options.older_than or DAY, stable_until=schedule.stable_until)
    pruned = plan(store, retention, newest, {}, undoable=False)
    verb = "would delete" if options.dry_run else "deleted"
    if not options.dry_run:
        pruned.apply(store)
    for file in pruned.rewound:
        say(f"{verb} what a rewind has set aside of step {file.step}")
    for step in pruned.snapshots:
        say(f"{verb} the snapshot of step {step}")
    for file in pruned.leftovers:
        what = f"the unfinished upload of {file.path}" if file.upload else f"{file.path}, which belongs to no snapshot"
        say(f"{verb} {what}")
    stay = [step for step in found.steps if step not in pruned.snapshots]
    say(f"{'would stay' if options.dry_run else 'left'}: {', '.join(map(str, sorted(stay)))}")
    return 0


def rewind_command(options: Options) -> int:
    above, at = split_url(options.url)
    url = run_dir_of(above)
    step = at if options.step is None else options.step
    if (step is None) != options.undo or at not in (None, step):
        raise UserError("give one step to go back to, as RUN@9000 or with --step, or --undo without a step")
    store = Store(options.snapshots or f"{url}/{SNAPSHOTS}", "URL")
    newest = max(store.folders(), default=None)
    look_elsewhere(url, newest)
    if newest is None:
        raise UserError(
            f"{store.url}: no snapshot is there: give a run's directory, and with --snapshots the place of its "
            f"snapshots if snapshot.dir was set"
        )
    if step is None:
        undo(url, store, options.hot_dir, say)
    else:
        rewind(url, store, step, options.hot_dir, say)
    return 0
