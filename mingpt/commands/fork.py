"""`mingpt fork RUN@STEP NEW key=value …`: a run of its own in NEW, which continues step STEP of RUN.

NEW's first snapshot shares its files with RUN's: nothing is copied on one disk, nothing is uploaded within one bucket.
The keys are those of `mingpt train`; all others keep the values that RUN had at that step.
"""

import argparse
import shlex

from mingpt.config.affecting import settings
from mingpt.config.commandline import CommandLine
from mingpt.config.configfile import NAME
from mingpt.config.keys import leaves
from mingpt.config.schema import Config
from mingpt.config.stored import OF_EACH_RUN, fork_config, is_below, is_own_place
from mingpt.console import say
from mingpt.errors import Damaged, UserError
from mingpt.folder import Folder
from mingpt.redact import BLANK, printable, without_secrets
from mingpt.snapshot.forking import fork, new_named, run_of
from mingpt.snapshot.reader import find, read_manifest
from mingpt.storage import name_of
from mingpt.train.resume import changed


def fork_command(options: argparse.Namespace) -> int:

    found = find(options.source)
    step = found.steps[0]
    try:
        manifest = read_manifest(found.store, step)
    except Damaged as damage:
        raise UserError(f"{found.store.folder_url(step)}: {damage}: choose another step") from damage
    given = {override.key_or_group for override in CommandLine.of(options.overrides).overrides}
    planned = parent.keys if (parent := new_named(manifest)) else ()
    if lost := [printable(key) for key in planned if not is_below(key, given)]:
        raise UserError(
            f"{found.store.folder_url(step)}: with this snapshot that run begins, and what it has changed is not in "
            f"there yet: give {', '.join(f'{key}=…' for key in lost)} again, or choose a later step of it"
        )
    if "run.dir" in given:
        raise UserError(f"run.dir: NEW, {without_secrets(options.target)}, is the run's directory: leave run.dir out")
    config, places = fork_config(
        manifest.config,
        options.overrides,
        name_of(options.target.rstrip("/")),
        options.target,
        run_of(found.store),
        options.trust,
    )
    before, after = without_secrets(manifest.config), without_secrets(config.model_dump())
    old, new = settings(before)[0], settings(after)[0]
    differing = [key for key in sorted(new) if old.get(key) != new[key] and not is_below(key, OF_EACH_RUN)]
    keys = [key for key in differing if is_below(key, given) or not is_own_place(key)]
    fork(found.store, manifest, config, keys, changed(before, after), say)
    for key, value in places.items():
        say(printable(f"{key}={without_secrets(value)}, as in the snapshot's config"))
    for key in differing:
        say(printable(f"{key}: {old.get(key)} -> {new[key]}"))
    what = f"step {step} of {printable(manifest.run)}, digest {manifest.digest}"
    say(f"{without_secrets(config.run.dir)} continues {what}")
    say(f"train it: {_continues(config, options.overrides)}")
    if secrets := [key for key, value in leaves(after) if isinstance(value, str) and BLANK in value]:
        say(f"and add {', '.join(f'{key}=…' for key in secrets)}: a run's files hold no secrets")
    return 0


def _continues(config: Config, overrides: list[str]) -> str:
    """The command that trains the fork."""

    run = Folder(config.run.dir)
    if run.local:
        folder = run.root if "://" in run.url else config.run.dir
        return shlex.join(["mingpt", "train", "--config-dir", folder, "--config-name", NAME.removesuffix(".yaml")])
    more = [f"run.name={config.run.name}", f"run.dir={config.run.dir}", *overrides]
    return f"the parent's command with {without_secrets(shlex.join(more))} at its end"
