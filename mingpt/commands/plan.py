"""`mingpt plan [key=value …] --gpus NAME:N [--num-nodes N]`: what a run needs and costs, before a machine is rented.

The keys are those of `mingpt train`; without data, random tokens of GPT-2's vocabulary. Nothing is computed, and no GPU
is needed: the model and one microbatch are looked at on tensors without memory. Exit codes: 0; 64 a problem of the
config (all are listed), or the run does not fit.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from mingpt.compute.batches import position
from mingpt.config import compose
from mingpt.config.schema import Config
from mingpt.console import say, say_json
from mingpt.errors import FINISHED, UserError
from mingpt.model.language import Language
from mingpt.observe.speed import GPUS, Gpu, flops_per_token
from mingpt.train.footprint import footprint, look_at

GB = 10**9
MFU = 0.4  # of the GPUs' peak, for the time that a run takes: what large models reach
ROOM = 0.05  # of a GPU's memory, for what the allocator can't use
CURES = "optimizer.shard=true, train.recompute=block, train.loss_rows=1024, another batch.micro_size, more nodes"


def plan_command(options: argparse.Namespace) -> int:

    name, per_node = _machine(options, GPUS)
    gpu, processes = GPUS.get(name), per_node * options.num_nodes
    config = _config(options.overrides, processes)
    model = look_at(config)
    needed = footprint(config, model, processes, per_node)
    total = needed.total(bool(gpu))
    fits = total <= gpu.memory * GB * (1 - ROOM) if gpu else None
    plan = {"parameters": model.parameters, "processes": processes, **vars(needed), "total": total}
    if options.json:
        say_json(plan | {"fits": fits})
    else:
        say("\n".join(_lines(plan)))
        if gpu:
            say(_cost(config, model.parameters, gpu, processes))
            say(f"{'fits' if fits else 'does not fit'} into a {name} of {gpu.memory} GB, of which {ROOM:.0%} stay free")
    if fits is False:
        raise UserError(f"the run needs too much memory; what spares some (docs/memory.md): {CURES}")
    return FINISHED


def _lines(plan: Mapping[str, Any]) -> Iterator[str]:
    for key, value in plan.items():
        if isinstance(value, dict):
            yield f"{key}:"
            yield from (f"  {name:<42}{size / GB:8.2f} GB" for name, size in value.items())
        else:
            yield f"{key}: {value:,}"


def _cost(config: Config, parameters: int, gpu: Gpu, gpus: int) -> str:
    """How long the run takes at MFU of the peak, and what that costs."""

    shape, steps = config.model, config.train.max_steps
    assert isinstance(shape, Language)
    tokens = position(steps, config.batch.global_size, config.batch.double_at) * shape.block_size
    flops = flops_per_token(parameters, shape.n_layer, shape.n_embd, shape.block_size)
    hours = tokens * flops / (gpu.peak(config.precision) * MFU * gpus) / 3600
    price = config.run.price_per_hour
    cost = f", a cost of {price * hours:,.2f}" if price else "; run.price_per_hour=… tells the cost"
    return f"{steps:,} steps, {tokens:,} tokens: {hours:,.2f} hours at {MFU:.0%} of the peak (an estimate){cost}"


def _machine(options: argparse.Namespace, gpus: Mapping[str, Gpu]) -> tuple[str, int]:
    """(the GPU's name, "" for none; processes on each node)."""
    if options.num_nodes < 1 or (options.processes or 1) < 1:
        raise UserError("--num-nodes and --processes: give numbers from 1")
    if not options.gpus:
        return "", options.processes or 1
    asked, _, number = options.gpus.partition(":")
    name = next((name for name in gpus if name.upper() == asked.upper()), "")
    if not name:
        raise UserError(f"--gpus {options.gpus}: the memory of this GPU is not known here; there are {', '.join(gpus)}")
    if not (number or "1").isdecimal() or int(number or 1) < 1:
        raise UserError(f"--gpus {options.gpus}: give NAME:NUMBER, such as L4:1")
    return name, options.processes or int(number or 1)


def _config(overrides: list[str], processes: int) -> Config:

    named = any(word.startswith(("data", "experiment=", "+experiment=")) for word in overrides)
    config = compose.configure([*([] if named else ["data=random"]), *overrides], processes)
    if config is None:
        raise UserError("--cfg and --info are for `mingpt train`: leave them out")
    if not config.batch.micro_size:
        raise UserError("batch.micro_size=auto: a plan is made for a number: give one")
    if not isinstance(config.model, Language) or config.optimizer.target:
        own = "optimizer" if config.optimizer.target else "model"
        raise UserError(f"{own}._target_: only this package's models and optimizers can be planned, not one's own")
    return config
