"""`python -m mingpt.snapshots`: look at the snapshots of a run, check, copy, prune and export them.

URL is a run's directory, its snapshots folder, or one step's folder; any fsspec URL.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict

from pydantic import ValidationError

from mingpt.command import Unfit, command
from mingpt.config.commandline import Parser
from mingpt.config.schema import Snapshot
from mingpt.console import say
from mingpt.errors import Damaged, OtherFormat, Unreadable, UserError
from mingpt.redact import without_secrets
from mingpt.snapshot.catalog import DAMAGED, as_table, described, entry, runs_below, runs_table
from mingpt.snapshot.copying import copy_metrics, copy_step, refuse_others
from mingpt.snapshot.files import SNAPSHOTS
from mingpt.snapshot.find import Found, find, split_url
from mingpt.snapshot.reader import look, read_manifest, verify
from mingpt.snapshot.retention import DAY, Retention, plan
from mingpt.snapshot.rewinding import rewind
from mingpt.snapshot.store import Store

Options = argparse.Namespace


def list_command(options: Options) -> int:
    """A table of the steps, or of the runs in a folder. Exit code 1 if one is damaged.

    The manifests are read, and of the parts the sizes.
    """
    try:
        found = find(options.url, options.step, committed=False)
    except UserError:
        if options.step is not None or not (runs := runs_below(options.url)):
            raise
        say(json.dumps({name: asdict(e) for name, e in runs}, indent=1) if options.json else runs_table(runs))
        return int(any(e.state == DAMAGED for _, e in runs))
    entries = [entry(found.store, step) for step in found.steps]
    if options.json:
        say(json.dumps([asdict(e) for e in entries], indent=1))
    else:
        say(as_table(entries))
    return int(any(e.state == DAMAGED for e in entries))


def verify_command(options: Options) -> int:
    """Read everything and compare it with the checksums. Exit code 1 if anything is damaged."""
    found = find(options.url, options.step)

    def verify_one(step: int) -> None:
        say(f"step {step}: good, digest {verify(found.store, step).digest}")

    return _each_step(found, verify_one, "DAMAGED", "not verified")


def _each_step(found: Found, act: Callable[[int], None], damaged: str, undone: str) -> int:
    """Act on the steps, the newest first: if anything stops this, the best of it is done. 1 if one is damaged.

    One of another format does not keep the others back; its UserError is raised in the end, unless one was damaged.
    """
    bad, other = 0, None
    for step in found.steps:
        try:
            act(step)
        except (Damaged, Unreadable) as damage:
            bad = 1
            say(f"step {step}: {damaged}: {found.store.folder_url(step)}: {damage}")
        except UserError as mistake:
            if not _is_of_other_format(found.store, step):
                raise
            other = other or mistake
            say(f"step {step}: of another format, {undone}")
    if other and not bad:
        raise other
    return bad


def _is_of_other_format(store: Store, step: int) -> bool:
    try:
        look(store, step)
    except OtherFormat:
        return True
    return False


def digest_command(options: Options) -> int:
    """The digest of the newest snapshot (or of --step) alone on stdout, after verifying it."""
    found = find(options.url, options.step)
    try:
        say(verify(found.store, found.steps[0]).digest)
    except Damaged as damage:
        raise Unfit(f"{found.store.folder_url(found.steps[0])}: {damage}") from damage
    return 0


def show_command(options: Options) -> int:
    """What the manifest of the newest snapshot (or of --step) says: config, attempts, numerics, sizes."""
    found = find(options.url, options.step)
    try:
        manifest = read_manifest(found.store, found.steps[0])
    except Damaged as damage:
        raise Unfit(f"{found.store.folder_url(found.steps[0])}: {damage}") from damage
    say(json.dumps(manifest.model_dump(), indent=1) if options.json else described(manifest))
    return 0


def prune_command(options: Options) -> int:
    """Delete what need not stay. Without --keep and --keep-every: as the newest snapshot's config says."""
    if split_url(options.url)[1] is not None:
        raise UserError(f"{without_secrets(options.url)} is one step's folder: give the run's directory")
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
    except (ValidationError, TypeError) as error:
        raise UserError(f"{store.folder_url(newest)}: its config does not say what to keep: give --keep") from error
    settings = {k: settings[k] if value is None else value for k, value in given.items()}
    pruned = plan(store, Retention(**settings, orphan_age=options.older_than), newest, {})
    verb = "would delete" if options.dry_run else "deleted"
    if not options.dry_run:
        pruned.apply(store)
    for step in pruned.snapshots:
        say(f"{verb} the snapshot of step {step}")
    for file in pruned.leftovers:
        say(f"{verb} {file.path}, which belongs to no snapshot")
    for upload in pruned.uploads:
        say(f"{verb} the half upload of {upload.path}")
    stay = [step for step in found.steps if step not in pruned.snapshots]
    say(f"{'would stay' if options.dry_run else 'left'}: {', '.join(map(str, sorted(stay)))}")
    return 0


def rewind_command(options: Options) -> int:
    """Go back: the run continues from --step, and all newer snapshots are set aside. Nothing is deleted."""
    above, named = split_url(options.url)
    if named is not None:
        raise UserError(
            f"{without_secrets(options.url)} is one step's folder: give {without_secrets(above)}'s run and --step"
        )
    store = Store(options.snapshots or f"{options.url.rstrip('/')}/snapshots", "URL")
    if not store.steps():
        raise UserError(
            f"{store.url}: no snapshot is there: give a run's directory, and with --snapshots the place of its "
            f"snapshots if snapshot.dir was set"
        )
    rewind(options.url, store, options.step, options.hot_dir, say)
    return 0


def copy_command(options: Options) -> int:
    """Copy snapshots, and the metrics of their run, to TO, another run's directory."""
    found = find(options.url, options.step)
    above, named = split_url(options.target)
    if named is not None and found.steps != [named]:
        raise UserError(f"{without_secrets(options.target)} is one step's folder, and not that of {found.steps[0]}")
    target = Store(above, "URL")
    if named is None and not target.root.endswith(f"/{SNAPSHOTS}") and not target.folders():
        target = Store(f"{above.rstrip('/')}/{SNAPSHOTS}", "URL")  # where a run looks for them
    refuse_others(found.store, target, found.steps)
    copy_metrics(found.store, target, say)
    return _each_step(
        found, lambda step: copy_step(found.store, target, step, say), "DAMAGED, not copied", "not copied"
    )


def export_command(options: Options) -> int:
    """Write the newest snapshot's GPT (or --step's) as a folder that Hugging Face's transformers loads."""
    # torch's models are slow to import, and needed here only.
    from mingpt.commands.loading import load
    from mingpt.weights.writing import folder_of, write_folder

    found = find(options.url, options.step)
    where = found.store.folder_url(found.steps[0])
    try:
        loaded = load(found.store, found.steps[0], where)
    except Damaged as damage:
        raise Unfit(f"{where}: {damage}: nothing was written; choose another with --step") from damage
    files = folder_of(loaded.model, loaded.vocabulary)
    write_folder(options.folder, files, options.overwrite)
    say(f"step {found.steps[0]} (digest {loaded.manifest.digest[:16]}): {', '.join(files)}")
    say(f"written to {without_secrets(options.folder)}")
    return 0


def _count(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return number


def _parser() -> Parser:
    parser = Parser(prog="python -m mingpt.snapshots", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, one_step: str | None, as_json: bool = False) -> argparse.ArgumentParser:
        text = COMMANDS[name].__doc__
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("url", metavar="URL", help="a run's directory, its snapshots folder, or a step's folder")
        if one_step:
            command.add_argument("--step", type=int, help=f"this step instead of {one_step}")
        if as_json:
            command.add_argument("--json", action="store_true", help="for programs")
        return command

    add("list", "all", as_json=True)
    add("verify", "all")
    add("digest", "the newest")
    add("show", "the newest", as_json=True)
    prune = add("prune", None)
    prune.add_argument("--keep", type=_count(1), metavar="N", help="the newest N stay")
    prune.add_argument("--keep-every", type=_count(0), metavar="N", help="multiples of N stay; 0: none")
    prune.add_argument(
        "--keep-best", action=argparse.BooleanOptionalAction, help="the best by validation loss stays, or need not"
    )
    prune.add_argument(
        "--older-than", type=_count(1), default=DAY, metavar="SECONDS",
        help="age from which files without a snapshot are a dead writer's (default: 86400, a day)",
    )  # fmt: skip
    prune.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    back = add("rewind", None)
    back.add_argument("--step", type=_count(0), required=True, metavar="N", help="the step to go on from")
    back.add_argument("--snapshots", metavar="URL", help="snapshot.dir, if the run has set one")
    back.add_argument("--hot-dir", default="/dev/shm", metavar="FOLDER", help="snapshot.hot_dir (default: /dev/shm)")
    copy = add("copy", "all")
    copy.add_argument(
        "target", metavar="TO", help="where to: a run's directory, its snapshots folder, or a step's folder"
    )
    export = add("export", "the newest")
    export.add_argument("folder", metavar="FOLDER", help="where to: a local folder, or any fsspec URL")
    export.add_argument("--overwrite", action="store_true", help="replace what is there")
    return parser


COMMANDS = {
    "list": list_command,
    "verify": verify_command,
    "digest": digest_command,
    "show": show_command,
    "prune": prune_command,
    "rewind": rewind_command,
    "copy": copy_command,
    "export": export_command,
}


@command()
def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    return COMMANDS[options.command](options)
