"""`mingpt evaluate`: evaluate a snapshot's model on data, and print the figures as text or JSON."""

import math
import os
from argparse import Namespace
from typing import Any

from mingpt.cli.console import complain, say, say_json
from mingpt.commands.loading import find_manifest, open_model
from mingpt.compose.commandline import given
from mingpt.compose.stored import evaluation_config
from mingpt.compute.numerics import autocast_for, pin
from mingpt.data.opening import open_data
from mingpt.data.vocabulary import vocabulary_of
from mingpt.errors import FINISHED, UserError
from mingpt.observe.console import ConsoleLines
from mingpt.train.agreeing import agree_on_inputs
from mingpt.train.attempt import report_failure
from mingpt.train.evaluation import EvalResult, byte_lengths, evaluate
from mingpt.world.env import Env
from mingpt.world.joining import join
from mingpt.world.lifetime import Lifetime
from mingpt.world.platforms import require_launcher


def evaluate_command(options: Namespace, lifetime: Lifetime) -> int:
    """Print the figures; returns the exit code."""
    try:
        require_launcher(os.environ)
        store, manifest = find_manifest(options.url, options.step)
        config = evaluation_config(manifest.config, store.run_dir, given(options), Env.read(check=True).size)
        vocabulary = vocabulary_of(manifest.vocabulary)
        source = open_data(config.data, config.model.block_size, config.batch.micro_size, vocabulary)
        if source.vocabulary.to_json() != vocabulary.to_json():
            raise UserError(f"data.kind={config.data.kind} has another vocabulary than {store.url}: choose other data")
        if not len(source.validation):
            raise UserError(f"data.kind={config.data.kind} has nothing to evaluate on: {config.data.validation}")
        with join(config.world) as world:
            agree_on_inputs(world, config, source)
            pin(config, world.device)
            # All processes take rank 0's step: a run that is still training may have committed a newer one.
            opened = open_model(options.url, options.step, agree=world.broadcast, ema=options.ema)
            figures = evaluate(
                opened.model.to(world.device),
                source.validation,
                world,
                autocast_for(config, world.device),
                byte_lengths(source.vocabulary),
                seed=config.seed,
                step=opened.manifest.step,
                publish=ConsoleLines(opened.manifest.step, complain).on if world.is_main else lambda event: None,
            )
            if not figures.targets:
                raise UserError(
                    f"data.kind={config.data.kind}: no target of its validation split counts: choose other data"
                )
            if world.is_main:
                shown = as_dict(figures) | {"step": opened.manifest.step, "digest": opened.manifest.digest}
                if options.json:
                    say_json(shown)
                else:
                    say(f"{opened.where} on {name_data(config.data.model_dump())}")
                    say(as_text(figures))
            lifetime.ignore_signals()
            world.barrier()
        return FINISHED
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # as train/attempt.py
        return report_failure(error, lifetime)


def as_dict(figures: EvalResult) -> dict[str, Any]:
    """The figures that were measured, for JSON."""
    everything = {
        "loss": figures.loss,
        "perplexity": perplexity(figures),
        "targets": figures.targets,
        "bits_per_byte": figures.bits_per_byte,
        "bytes": figures.spelled or None,
        "accuracy": figures.accuracy,
        "right": figures.right if figures.questions else None,
        "questions": figures.questions or None,
    }
    shown: dict[str, Any] = {key: value for key, value in everything.items() if value is not None}
    parts = {name: as_dict(part) for name, part in figures.parts.items() if part.targets}
    return shown | ({"parts": parts} if parts else {})


def perplexity(figures: EvalResult) -> float:
    return math.exp(figures.loss) if figures.loss < 700 else math.inf


def as_text(figures: EvalResult) -> str:
    lines = [
        f"loss           {figures.loss:.4f} nats a token ({figures.targets:,.0f} tokens)",
        f"perplexity     {perplexity(figures):.4f}",
    ]
    if figures.bits_per_byte is not None:
        lines.append(f"bits per byte  {figures.bits_per_byte:.4f} ({figures.spelled:,.0f} bytes)")
    if figures.accuracy is not None:
        lines.append(f"accuracy       {figures.accuracy:.2%} ({figures.right:,} of {figures.questions:,})")
    lines += [
        f"{f'of {name}':<14} {part.loss:.4f} nats a token ({part.targets:,.0f} tokens)"
        for name, part in figures.parts.items()
    ]
    return "\n".join(lines)


def name_data(data: dict[str, Any]) -> str:
    """The data's kind and, if it has one, its path."""
    path = f" data.path={data['path']}" if "path" in data else ""
    return f"data.kind={data['kind']}{path}"
