"""What `mingpt train -m KEY=A,B …` does: Hydra's multirun, with any of its sweepers and launchers.

Each job is a run in a folder of its own, trained by `mingpt launch` in a process of its own, so the same command again
goes on where it was. Hydra knows nothing of our exit codes and stops at the first mistake: both are added here.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from mingpt.cli.command import quoted
from mingpt.cli.console import complain, say
from mingpt.compose.commandline import FIRST, SEARCHPATH, CommandLine, options_given, parser
from mingpt.compose.compose import configure
from mingpt.compose.groups import config_dir
from mingpt.compose.overrides import first_line, hydra_of
from mingpt.compose.printing import blanked
from mingpt.config.checks import missing_places
from mingpt.errors import FINISHED, STOPPED, UserError
from mingpt.files.storage import install
from mingpt.history.history import History
from mingpt.report.runs import best_first, rows, table
from mingpt.world.env import START
from mingpt.world.lifetime import end_with_parent

LAUNCH = (sys.executable, START, "mingpt.launch")
HYDRAS = ("hydra.", "hydra/")  # settings of Hydra itself
PLACES = ("run.dir", "run.name", "snapshot.dir")
PLUGINS = {"hydra/launcher": ("joblib", "submitit"), "hydra/sweeper": ("optuna",)}  # extras that bring them


class JobFailed(Exception):
    """A job's launch ended with another exit code than 0."""

    def __init__(self, folder: str, code: int) -> None:
        super().__init__(folder, code)
        self.folder, self.code = folder, code


def multirun(arguments: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _stop)
    try:
        options = parser().parse_intermixed_args(arguments)
        folder, fixed = _checked(options)
        without = f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]"
        code = _run(["--multirun", *options_given(options), *options.overrides, without])
        if found := rows(folder):
            say(table(best_first(found)))
        return code
    except KeyboardInterrupt:
        complain("stopped on request: the same command again goes on")
        return STOPPED


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _run(arguments: list[str]) -> int:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints an error as its own, and ends with 1
    sys.argv[1:] = arguments
    try:
        hydra.main(config_path=str(config_dir()), config_name=FIRST, version_base="1.3")(job)()
    except JobFailed as failed:
        complain(f"{failed.folder}: exit code {failed.code}: see {failed.folder}.log; the same command again goes on")
        return failed.code
    except HydraException as error:
        raise UserError(_words(error)) from error
    return FINISHED


def _words(error: HydraException) -> str:
    """Hydra's first line, and what brings a plugin that is not there."""
    first = first_line(error)
    extras = next((extras for group, extras in PLUGINS.items() if f"'{group}" in first), ())
    return f"{first} ({' or '.join(map(install, extras))})" if extras else first


def job(config: DictConfig) -> float | None:
    """Train a job's run, in whatever process the launcher has for it. Returns its validation loss."""
    own = HydraConfig.get()
    folder, above = f"{own.sweep.dir}/{own.sweep.subdir}", Path(own.runtime.cwd)
    command = [*LAUNCH, *_arguments(own), *places(folder)]
    with (above / f"{folder}.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=above,
            env={"WANDB_RUN_GROUP": Path(own.sweep.dir).name, **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes to this process, which asks the launch once
            # The kernel asks the launch to stop when the process that waits for it dies.
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM, STOPPED),
        )
        try:
            code = process.wait()
        except BaseException:  # a request to stop, also a launcher's own: the run writes a snapshot first
            process.terminate()
            process.wait()
            raise
    if code:
        raise JobFailed(folder, code)
    value = History(str(above / folder)).last_of("val_loss")
    return value if isinstance(value, float) else None


def _arguments(own: HydraConf) -> list[str]:
    """A job's options and overrides, as the command line has them."""
    options = [f"--config-dir={s.path}" for s in own.runtime.config_sources if s.provider == "command-line"]
    main = [s.path for s in own.runtime.config_sources if s.provider == "main"]
    options += [f"--config-path={path}" for path in main if path != str(config_dir())]
    options += [f"--config-name={own.job.config_name}"]
    return [*options, *(o for o in own.overrides.hydra if o.startswith(SEARCHPATH)), *own.overrides.task]


def places(folder: str) -> list[str]:
    return [f"run.name={Path(folder).name}", f"run.dir={quoted(folder)}"]


def _checked(options: argparse.Namespace) -> tuple[str, list[str]]:
    """The folder of all runs, and the keys that all jobs have. Raises UserError with every mistake of every job."""
    above = [*options_given(options), *(text for text in options.overrides if text.startswith(SEARCHPATH))]
    texts = [text for text in options.overrides if not text.lstrip("+~").startswith(HYDRAS)]
    line = CommandLine.of(above)
    problems = [*line.problems]
    if options.cfg or options.info:
        problems.append("--cfg and --info are for one run: leave -m and --multirun out, or these")
    for text in options.overrides:
        shown = blanked(text)  # also to find out whether there is a secret in it
        if text.partition("=")[0].lstrip("+~") in PLACES:
            problems.append(f"{shown}: each job has a place of its own: hydra.sweep.dir=… is the folder of all")
        elif shown != text:
            problems.append(f"{shown}: Hydra writes this to a file, and has a secret in it: give '${{oc.env:NAME}}'")
    if problems:
        raise UserError(*problems)
    try:
        with hydra_of(line):
            hydras = [text for text in options.overrides if text not in texts]
            own = hydra.compose(line.name, hydras, return_hydra_config=True).hydra
            fixed, jobs = _expanded(texts, search=not own.sweeper._target_.endswith(".BasicSweeper"))
    except HydraException as error:
        raise UserError(_words(error)) from error
    bucket = own.launcher.get("bucket")
    _validate(jobs, fixed, above, here=not bucket)
    return str(bucket or own.sweep.dir), fixed


def _expanded(texts: Sequence[str], search: bool) -> tuple[list[str], list[list[str]]]:
    """The keys that have one value, and the overrides of each job; of a search, which goes by results, the first."""
    parser, overrides = OverridesParser.create(GlobalHydra.instance().config_loader()), list[Override]()
    for text in texts:
        try:
            overrides.append(parser.parse_override(text))
        except HydraException:
            raise UserError(*CommandLine.of([text]).problems) from None
    fixed = [override.key_or_group for override in overrides if not override.is_sweep_override()]
    for i, override in enumerate(overrides):
        if isinstance(interval := override.value(), IntervalSweep) and search:
            overrides[i] = parser.parse_override(f"{override.get_key_element()}={interval.start}")
        elif isinstance(interval, IntervalSweep):
            raise UserError(f"{override.input_line}: an interval is for a search: add hydra/sweeper=optuna")
    (jobs,) = BasicSweeper.split_arguments(overrides, None)
    return fixed, jobs[:1] if search else jobs


def _validate(jobs: Sequence[Sequence[str]], fixed: Sequence[str], above: Sequence[str], here: bool) -> None:
    """Raise UserError with every problem of every job. here: also places that are not there, since jobs run here."""
    problems = dict[str, list[str]]()
    for overrides in jobs:
        try:
            config = configure([*above, *overrides], trains=here)
            if here and (missing := missing_places(config, [])):
                raise UserError(*missing)
        except UserError as error:
            for problem in error.problems:
                own = [o for o in overrides if o.partition("=")[0].lstrip("+~") not in fixed]
                problems.setdefault(problem, []).append(" ".join(own))
    if problems:
        raise UserError(*(p if len(n) == len(jobs) else f"{p} ({', '.join(n)})" for p, n in problems.items()))
