"""What `mingpt snapshots` does: one function a command (`export`, for which torch's models are imported: export.py)."""

import argparse
from collections.abc import Callable
from dataclasses import asdict

from pydantic import ValidationError

from mingpt.command import Unfit
from mingpt.config.keys import filled
from mingpt.config.schema import Schedule, Snapshot
from mingpt.console import say, say_json
from mingpt.errors import Damaged, OtherFormat, Unreadable, UserError
from mingpt.redact import without_secrets
from mingpt.snapshot.catalog import DAMAGED, inspect_step, render_manifest, runs_below, runs_table, steps_table
from mingpt.snapshot.copying import check_conflicts, check_same_run, copy_metrics, copy_step
from mingpt.snapshot.files import SNAPSHOTS
from mingpt.snapshot.find import Found, find, run_dir_of, split_url
from mingpt.snapshot.reader import read_manifest, verify
from mingpt.snapshot.retention import DAY, Retention, plan
from mingpt.snapshot.rewinding import rewind, undo
from mingpt.snapshot.store import Store

Options = argparse.Namespace


def list_command(options: Options) -> int:
    try:
        found = find(options.url, options.step, committed=False)
    except UserError:
        if options.step is not None or not (runs := runs_below(options.url)):
            raise
        say_json({name: asdict(e) for name, e in runs}) if options.json else say(runs_table(runs))
        return int(any(e.state == DAMAGED for _, e in runs))
    entries = [inspect_step(found.store, step) for step in found.steps]
    if options.json:
        say_json([asdict(e) for e in entries])
    else:
        say(steps_table(entries))
    return int(any(e.state == DAMAGED for e in entries))


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
    try:
        say(verify(found.store, found.steps[0]).digest)
    except Damaged as damage:
        raise Unfit(f"{found.store.folder_url(found.steps[0])}: {damage}") from damage
    return 0


def show_command(options: Options) -> int:
    found = find(options.url, options.step)
    try:
        manifest = read_manifest(found.store, found.steps[0])
    except Damaged as damage:
        raise Unfit(f"{found.store.folder_url(found.steps[0])}: {damage}") from damage
    say_json(manifest.model_dump()) if options.json else say(render_manifest(manifest))
    return 0


def prune_command(options: Options) -> int:
    if split_url(options.url)[1] is not None:
        raise UserError(f"{without_secrets(options.url)} names one step: give the run's directory")
    found = find(options.url)
    store, newest = found.store, found.steps[0]
    try:
        manifest = verify(store, newest)
    except Damaged as damage:
        problem = f"{store.folder_url(newest)}: {damage}: nothing was deleted, since older ones may be needed"
        raise Unfit(problem) from damage
    given = {"keep": options.keep, "keep_every": options.keep_every, "keep_best": options.keep_best}
    own = manifest.config.get("snapshot") or {}
    try:
        settings = Snapshot.model_validate({k: own[k] for k in given if k in own}).model_dump()
        schedule = Schedule(**filled(manifest.config)["schedule"])
    except (ValidationError, TypeError) as error:
        raise UserError(f"{store.folder_url(newest)}: its config does not say what to keep: give --keep") from error
    settings = {k: settings[k] if value is None else value for k, value in given.items()}
    retention = Retention(**settings, orphan_age=options.older_than or DAY, stable_until=schedule.stable_until)
    pruned = plan(store, retention, newest, {})
    verb = "would delete" if options.dry_run else "deleted"
    if not options.dry_run:
        pruned.apply(store)
    for step in pruned.snapshots:
        say(f"{verb} the snapshot of step {step}")
    for file in pruned.leftovers:
        say(f"{verb} {file.path}, which belongs to no snapshot")
    for upload in pruned.uploads:
        say(f"{verb} the unfinished upload of {upload.path}")
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
    if not store.folders():
        raise UserError(
            f"{store.url}: no snapshot is there: give a run's directory, and with --snapshots the place of its "
            f"snapshots if snapshot.dir was set"
        )
    if step is None:
        undo(url, store, options.hot_dir, say)
    else:
        rewind(url, store, step, options.hot_dir, say)
    return 0


def copy_command(options: Options) -> int:
    found = find(options.url, options.step)
    above, named = split_url(options.target)
    if named is not None and found.steps != [named]:
        raise UserError(f"{without_secrets(options.target)} is one step's folder, and not that of {found.steps[0]}")
    target = Store(above, "URL")
    if named is None and not target.root.endswith(f"/{SNAPSHOTS}") and not target.folders():
        target = Store(f"{above.rstrip('/')}/{SNAPSHOTS}", "URL")  # where a run looks for them
    check_conflicts(found.store, target, found.steps)
    if not {*found.steps} <= {*target.steps()}:  # else the metrics are there, too; a fork's own have the same names
        check_same_run(found.store, target)
        copy_metrics(found.store, target, say)
    return _each_step(
        found, lambda step: copy_step(found.store, target, step, say), "DAMAGED, not copied", "not copied"
    )
