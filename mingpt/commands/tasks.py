"""`mingpt evaluate --tasks`: a snapshot's model answers tasks of lm-eval."""

import argparse
import sys
from contextlib import redirect_stdout

from mingpt.commands.loading import find_manifest, open_model
from mingpt.compute.numerics import autocast_for, pin
from mingpt.config.commandline import given
from mingpt.config.stored import evaluation_config
from mingpt.console import say, say_json
from mingpt.errors import FINISHED, UserError
from mingpt.train.tasks import Results, check_text, load_tasks, measure
from mingpt.world.env import Env
from mingpt.world.joining import join
from mingpt.world.lifetime import Lifetime

OF_TASKS = ("num-fewshot", "limit", "batch-size", "include-path")  # options
SHOWN = ("results", "groups", "versions", "n-shot", "n-samples")  # of lm-eval's results, under its own names


def answer_tasks(options: argparse.Namespace, lifetime: Lifetime) -> int:
    """Print the figures; returns the exit code. The tasks, not the run's data, are what is read: that may be gone."""
    names = tuple(name for name in options.tasks.split(",") if name)
    if not names:
        raise UserError("--tasks: name at least one task")
    if data := [o for o in options.overrides if o.startswith("data")]:
        raise UserError(f"{data[0]}: tasks bring their own data: leave it out, or leave --tasks out")
    store, manifest = find_manifest(options.url, options.step)
    # Any kind of data that needs no file: none is opened.
    config = evaluation_config(
        manifest.config, store.run_dir, ["data=random", *given(options)], Env.read(check=True).size
    )
    tasks = load_tasks("--tasks", names, options.include_path, options.num_fewshot)
    from mingpt.train.harness import Harness  # imports lm-eval, an optional package

    with join(config.world) as world:
        pin(config, world.device)
        # A run may go on: rank 0's newest step.
        opened = open_model(options.url, options.step, agree=world.broadcast, ema=options.ema)
        harness = Harness(
            opened.model.to(world.device),
            check_text("--tasks", opened.vocabulary),
            world,
            autocast_for(config, world.device),
            options.batch_size or config.batch.micro_size,
            progress=True,
        )
        with redirect_stdout(sys.stderr):  # lm-eval and what it calls print now and then
            results = measure(tasks, harness, options.limit, errors=world.is_main)
        if world.is_main:
            snapshot = {"step": opened.manifest.step, "digest": opened.manifest.digest}
            if options.json:
                say_json({key: results[key] for key in SHOWN if key in results} | snapshot)
            else:
                say(f"{opened.where}\n{as_table(results)}")
        lifetime.ignore_signals()
        world.barrier()
    return FINISHED


def as_table(results: Results) -> str:
    """The table that lm-eval prints."""
    from lm_eval.utils import make_table  # an optional package

    tables = [make_table(results), *([make_table(results, "groups")] if "groups" in results else [])]
    return "\n".join(str(table).rstrip() for table in tables)
