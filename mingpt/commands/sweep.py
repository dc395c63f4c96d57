"""What `mingpt sweep` does: expand, validate all, run or submit what has not finished, and print a table."""

import argparse
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from mingpt.command import command
from mingpt.config.commandline import given
from mingpt.config.schema import Config
from mingpt.console import say
from mingpt.errors import FINISHED, UserError
from mingpt.storage import install
from mingpt.sweep import local, remote
from mingpt.sweep.__main__ import parser
from mingpt.sweep.expand import MOST, Trial, expand, validate
from mingpt.sweep.record import entry_of, has_finished, note, note_pruned, read_record, rows, table


@command()
def main(arguments: list[str]) -> int:
    options = parser().parse_intermixed_args(arguments)
    folder = _folder(options)
    overrides, options.overrides = options.overrides, []
    if (options.optimize or options.prune) and find_spec("optuna") is None:
        raise UserError(f"--optimize and --prune need Optuna, which is not installed: {install('optuna')}")
    if options.optimize:
        return _search(options, overrides, folder)
    trials = expand(given(options), overrides, folder, options.zip)
    configs = validate(trials, _world_size(options), places=options.on == "local" and not options.dry_run)
    if options.prune:
        _check_pruning(configs)
    more = shlex.split(options.launcher_args)
    jobs = [remote.sky(t, options.name, folder, more) for t in trials] if options.on == "sky" else []
    if options.dry_run:
        _show(options, trials, configs, folder, jobs)
        return FINISHED
    code = FINISHED
    if options.on != "local":  # before anything is written
        remote.check_there(options.on)
    if options.on == "sky":
        names = {trial.name for trial in _unfinished(trials, configs, folder)}
        if names:
            remote.submit_jobs([job for job, trial in zip(jobs, trials, strict=True) if trial.name in names])
    else:
        with local.locked(Path(folder)) as lock:
            waiting = _unfinished(trials, configs, folder)
            if options.on == "local":
                code = _run(options, ((trial, configs[trial.name]) for trial in waiting), folder, lock)
            elif waiting:
                submit = remote.sbatch(options.name, Path(folder), len(waiting), options.parallel, more)
                remote.submit_array(submit, Path(folder), waiting, lock)
    _tell(folder, [trial.name for trial in trials])
    return code


def _search(options: argparse.Namespace, overrides: Sequence[str], folder: str) -> int:
    from mingpt.sweep.search import Search  # Optuna's

    search = Search(given(options), overrides, folder, options.optimize, options.trials, _world_size(options))
    if options.prune:
        _check_pruning(search.corners)
    if options.dry_run:
        trial, config = search.first()
        say("# the first trial; the others follow from results")
        _show(options, [trial], {trial.name: config}, folder, [])
        return FINISHED
    with local.locked(Path(folder)) as lock:
        search.open()
        code = _run(options, search.jobs(), folder, lock, search.ended) or search.code()
    _tell(folder, search.names())
    return code


def _run(
    options: argparse.Namespace,
    jobs: Iterator[tuple[Trial, Config]],
    folder: str,
    lock: int,
    search: Callable[[Trial, int, bool], None] = lambda trial, code, pruned: None,
) -> int:
    median = None
    if options.prune:
        from mingpt.sweep.median import Median  # Optuna's

        known = read_record(folder) or {}
        median = Median(f"{folder}/{name}" for name, entry in known.items() if has_finished(entry))

    def ended(trial: Trial, code: int, pruned: bool) -> None:
        if pruned:
            note_pruned(folder, trial.name)
        elif median and code == FINISHED:
            median.add(trial.folder)
        search(trial, code, pruned)

    return local.run(jobs, options.parallel or 1, options.nproc_per_node, lock, median, ended)


def _tell(folder: str, names: Sequence[str]) -> None:
    known = read_record(folder) or {}
    say(table(rows(folder, {name: known[name] for name in names})))


def _world_size(options: argparse.Namespace) -> int:
    processes = options.nproc_per_node or ""
    return int(processes) if processes.isdecimal() else 1


def _check_pruning(configs: Mapping[str, Config]) -> None:
    if not any(0 < c.train.eval_every < c.train.max_steps for c in configs.values()):
        raise UserError("--prune: train.eval_every evaluates at the end only, so nothing can be compared: make it less")


def _folder(options: argparse.Namespace) -> str:
    problems = []
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", options.name):
        problems.append(f"--name={options.name}: give letters, digits, dots, dashes and underscores")
    if options.parallel is not None and options.parallel < 1:
        problems.append(f"--parallel={options.parallel}: give a number from 1")
    if not options.dir:
        problems.append("--dir is empty: give a folder")
    elif (options.on == "sky") != ("://" in options.dir):
        problems.append(
            f"--dir={options.dir}: --on sky needs a bucket's folder, s3://… or gs://…; others need a local one"
        )
    if options.on == "sky" and options.parallel:
        problems.append("--parallel: SkyPilot itself decides how many jobs run at a time: leave it out")
    if options.on != "local" and options.nproc_per_node:
        problems.append("--nproc-per-node: for --on local only: use --launcher-args")
    if (number := options.nproc_per_node) not in (None, "auto", "gpu") and not (number.isdecimal() and int(number)):
        problems.append(f"--nproc-per-node={number}: give a number from 1, or leave it out")
    try:
        shlex.split(options.launcher_args)
    except ValueError as error:
        problems.append(f"--launcher-args: {error}: close its quotes")
    if options.on == "local" and options.launcher_args:
        problems.append("--launcher-args: for --on slurm and --on sky only: leave it out")
    for given_there, option in ((options.optimize, "--optimize"), (options.prune, "--prune")):
        if given_there and options.on != "local":
            problems.append(f"{option}: for --on local only, where the sweep sees how its trials go: leave it out")
    if bool(options.optimize) != (options.trials is not None):
        problems.append("--optimize and --trials belong together: give both, or neither")
    if options.trials is not None and not 1 <= options.trials <= MOST:
        problems.append(f"--trials={options.trials}: give a number from 1 to {MOST}")
    if options.optimize and options.zip:
        problems.append("--zip: a search chooses each value on its own: leave out --zip or --optimize")
    if problems:
        raise UserError(*problems)
    return f"{options.dir.rstrip('/') or '/'}/{options.name}"


def _unfinished(trials: Sequence[Trial], configs: Mapping[str, Config], folder: str) -> list[Trial]:
    """Note the trials; returns those to be run, with those whose overrides are others: their resume tells that."""
    done = note(folder, {trial.name: entry_of(trial, configs[trial.name]) for trial in trials})
    if done:
        say(f"{len(done)} of {len(trials)} trials have finished already, or were pruned")
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
