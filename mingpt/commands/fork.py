"""`mingpt fork RUN@STEP NEW key=value …`: a run of its own in NEW, which continues step STEP of RUN.

NEW's first snapshot shares its files with RUN's: nothing is copied on one disk, nothing is uploaded within one bucket.
The keys are those of `mingpt train`; all others keep the values that RUN had at that step.
"""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from mingpt.cli.console import printable, say
from mingpt.compose.commandline import CommandLine
from mingpt.compose.stored import OF_EACH_RUN, fork_config, is_below, is_own_place
from mingpt.config.affecting import settings
from mingpt.config.configfile import NAME, create_config, lacks_secret, public_config
from mingpt.config.keys import leaves
from mingpt.config.schema import Config
from mingpt.errors import Damaged, UserError
from mingpt.files.folder import Folder
from mingpt.files.storage import name_of
from mingpt.snapshot.attempts import FORK, Parent, make_run_dir, new_named, newest_number, parent_of, records, utc_now
from mingpt.snapshot.format import Manifest
from mingpt.snapshot.reader import PARALLEL_PARTS, copy_part, damage_as, find, manifest_or_none, read_manifest
from mingpt.snapshot.store import Store
from mingpt.tiers import hot
from mingpt.train.resume import changed


def fork_command(options: argparse.Namespace) -> int:
    found = find(options.source)
    step = found.steps[0]
    with damage_as(UserError, found.store, step, ": choose another step"):
        manifest = read_manifest(found.store, step)
    given = {override.key_or_group for override in CommandLine.of(options.overrides).overrides}
    planned = parent.keys if (parent := new_named(manifest)) else ()
    if lost := [printable(key) for key in planned if not is_below(key, given)]:
        raise UserError(
            f"{found.store.folder_url(step)}: with this snapshot that run begins, and what it has changed is not in "
            f"there yet: give {', '.join(f'{key}=…' for key in lost)} again, or choose a later step of it"
        )
    if "run.dir" in given:
        raise UserError(f"run.dir: NEW, {options.target}, is the run's directory: leave run.dir out")
    config, places = fork_config(
        manifest.config,
        options.overrides,
        name_of(options.target.rstrip("/")),
        options.target,
        found.store.run_dir,
        options.trust,
    )
    # The parent's config has no secrets any more: this one's must not look like changes of it.
    before, after = manifest.config, public_config(config)
    old, new = settings(before)[0], settings(after)[0]
    differing = [key for key in sorted(new) if old.get(key) != new[key] and not is_below(key, OF_EACH_RUN)]
    keys = [key for key in differing if is_below(key, given) or not is_own_place(key)]
    _fork(found.store, manifest, config, keys, changed(before, after))
    for key, value in places.items():
        say(printable(f"{key}={value}, as in the snapshot's config"))
    for key in differing:
        say(printable(f"{key}: {old.get(key)} -> {new[key]}"))
    say(f"{config.run.dir} continues step {step} of {printable(manifest.run)}, digest {manifest.digest}")
    command = _continues(config, options.overrides)
    if step >= config.train.max_steps:
        say(f"it has no steps left, since train.max_steps={config.train.max_steps}: give a larger number")
        command += " train.max_steps=…"
    say(f"train it: {command}")
    if secrets := [key for key, value in leaves(after) if lacks_secret(value)]:
        say(f"and add {', '.join(f'{key}=…' for key in secrets)}: a run's files hold no secrets")
    return 0


def _fork(
    source: Store, manifest: Manifest, config: Config, keys: Sequence[str], changes: Mapping[str, list[Any]]
) -> None:
    """Make the first snapshot of the run of `config`. Its parts are shared with the parent's where that can be.

    keys, changes: what the fork's command line has changed; of these, what affects the result, with both values.
    config.yaml comes first, and names the one fork that may go on there: of two at once, the other ends here. An
    interrupted fork can be made again. Raises UserError if a run is there already, or the snapshot is damaged.
    """
    run_dir, target = config.run.dir, Store(config.snapshot.dir)
    parent = Parent(
        run=manifest.run,
        id=hot.find_run_id(source.run_dir),
        dir=source.run_dir,
        step=manifest.step,
        digest=manifest.digest,
        attempt=manifest.attempt,
        claim=claim.id if (claim := records(source.run_dir).get(manifest.attempt)) else None,
        keys=tuple(keys),
    )

    if target.root.startswith(f"{source.root}/"):
        raise UserError(f"{run_dir} lies in the parent's snapshots: give a place of its own")

    def check() -> None:
        others = {*target.folders()} - {manifest.step}
        theirs = manifest_or_none(target, manifest.step) if manifest.step in target.steps() else None
        if others or newest_number(run_dir) or (theirs and parent_of(theirs) != parent):
            raise UserError(f"{run_dir}: a run is there already, and it stays: give a place of its own")

    check()
    make_run_dir(run_dir)
    create_config(config, f"fork of step {manifest.step}, digest {manifest.digest}")
    hot.run_id(run_dir)
    entry = {
        "attempt": manifest.attempt + 1,
        "from_step": manifest.step,
        "at": utc_now(),
        "numerics": manifest.fingerprint,
        FORK: asdict(parent) | {"keys": [*keys]},
        **({"changes": {**changes}} if changes else {}),
    }
    ours = manifest.model_copy(update={"run": config.run.name, "history": [*manifest.history, entry]})
    with damage_as(UserError, source, manifest.step, ": choose another step"):
        say(_take(source, target, manifest))
    with target.named_errors():
        target.commit(ours)
    check()  # another process may have committed first: the same fork, or another run


def _take(source: Store, target: Store, manifest: Manifest) -> str:
    """Have all parts in the target. Returns how, in words. Raises Damaged."""

    def take(name: str) -> bool:
        with source.named_errors():
            source.check_size(manifest.step, name, manifest.parts[name].size)
            try:
                shared = target.share(source, manifest.step, name)
            except FileNotFoundError as error:
                raise Damaged(f"{name} is missing") from error
        if not shared:
            copy_part(source, target, manifest, name)
        return shared

    with ThreadPoolExecutor(PARALLEL_PARTS) as pool:
        shared = [*pool.map(take, sorted(manifest.parts))]
    size = sum(manifest.sizes.values())
    read_manifest(source, manifest.step)  # if the run has deleted it meanwhile, a part may be missing
    if not all(shared):
        return f"{len(shared)} parts, {size:,} bytes: copied, since the parent's place can't share them with this one"
    how = "the same files as the parent's (hard links)" if target.local else "copied by the store itself"
    return f"{len(shared)} parts, {size:,} bytes: {how}"


def _continues(config: Config, overrides: list[str]) -> str:
    """The command that trains the fork."""
    run = Folder(config.run.dir)
    if run.local:
        folder = run.root if "://" in run.url else config.run.dir
        return shlex.join(["mingpt", "train", "--config-dir", folder, "--config-name", NAME.removesuffix(".yaml")])
    more = [f"run.name={config.run.name}", f"run.dir={config.run.dir}", *overrides]
    return f"the parent's command with {shlex.join(more)} at its end"
