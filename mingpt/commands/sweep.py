"""What `mingpt sweep` does: expand, validate all, run or submit what has not finished, and print a table."""

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from mingpt.command import command
from mingpt.config.commandline import given
from mingpt.config.schema import Config
from mingpt.console import say
from mingpt.errors import FINISHED, UserError
from mingpt.sweep import local, remote
from mingpt.sweep.__main__ import parser
from mingpt.sweep.expand import Trial, expand, validate
from mingpt.sweep.record import entry_of, has_finished, read_record, rows, table, write_record


@command()
def main(arguments: list[str]) -> int:
    options = parser().parse_intermixed_args(arguments)
    folder = _folder(options)
    overrides, options.overrides = options.overrides, []
    trials = expand(given(options), overrides, folder, options.zip)
    processes = options.nproc_per_node or ""
    configs = validate(trials, int(processes) if processes.isdecimal() else 1)
    more = shlex.split(options.launcher_args)
    jobs = [remote.sky(t, options.name, folder, more) for t in trials] if options.on == "sky" else []
    if options.dry_run:
        _show(options, trials, configs, folder, jobs)
        return FINISHED
    if options.on == "local":
        with local.locked(Path(folder)) as lock:
            waiting = _unfinished(trials, configs, folder)
            code = local.run(waiting, configs, options.parallel or 1, options.nproc_per_node, lock)
    else:
        code, waiting = FINISHED, _unfinished(trials, configs, folder)
        if waiting and options.on == "slurm":
            submit = remote.sbatch(options.name, Path(folder), len(waiting), options.parallel, more)
            remote.submit_array(submit, Path(folder), waiting)
        elif waiting:
            names = {trial.name for trial in waiting}
            remote.submit_jobs([job for job, trial in zip(jobs, trials, strict=True) if trial.name in names])
    known = read_record(folder) or {}
    say(table(rows(folder, {trial.name: known[trial.name] for trial in trials})))
    say(f"a page with a picture: mingpt report {shlex.quote(folder)}")
    return code


def _folder(options: argparse.Namespace) -> str:
    problems = []
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", options.name):
        problems.append(f"--name={options.name}: give letters, digits, dots, dashes and underscores")
    if options.parallel is not None and options.parallel < 1:
        problems.append(f"--parallel={options.parallel}: give a number from 1")
    if (options.on == "sky") != ("://" in options.dir):
        problems.append(
            f"--dir={options.dir}: --on sky needs a bucket's folder, s3://… or gs://…; others need a local one"
        )
    if options.on == "sky" and options.parallel:
        problems.append("--parallel: SkyPilot itself decides how many jobs run at a time: leave it out")
    if options.on != "local" and options.nproc_per_node:
        problems.append("--nproc-per-node: for --on local only: use --launcher-args")
    if options.on == "local" and options.launcher_args:
        problems.append("--launcher-args: for --on slurm and --on sky only: leave it out")
    if problems:
        raise UserError(*problems)
    return f"{options.dir.rstrip('/') or '/'}/{options.name}"


def _unfinished(trials: Sequence[Trial], configs: Mapping[str, Config], folder: str) -> list[Trial]:
    """Note the trials; returns those to be run, with those whose overrides are others: their resume tells that."""
    before = read_record(folder) or {}
    now = {trial.name: entry_of(trial, configs[trial.name]) for trial in trials}
    write_record(folder, before | now)
    done = {name for name, entry in now.items() if before.get(name) == entry and has_finished(entry)}
    if done:
        say(f"{len(done)} of {len(trials)} trials have finished already")
    return [trial for trial in trials if trial.name not in done]


def _show(
    options: argparse.Namespace,
    trials: Sequence[Trial],
    configs: Mapping[str, Config],
    folder: str,
    jobs: Sequence[Sequence[str]],
) -> None:
    """The exact commands, which a shell takes."""
    if options.on == "local":
        for trial in trials:
            variables = [f"{key}={value}" for key, value in local.environment(configs[trial.name]).items()]
            say(shlex.join(["env", *variables, *local.command(trial, options.nproc_per_node)]))
    elif options.on == "slurm":
        say(f"# {folder}/{remote.TRIALS}:\n{remote.lines_of(trials)}".replace("\n", "\n# ").rstrip("# \n"))
        more = shlex.split(options.launcher_args)
        say(shlex.join(remote.sbatch(options.name, Path(folder), len(trials), options.parallel, more)))
    for job in jobs:
        say(shlex.join(job))
