"""`mingpt plan [key=value …] --gpus NAME:N [--num-nodes N]`: what a run needs and costs, before a machine is rented.

The keys are those of `mingpt train`; without data, random tokens of GPT-2's vocabulary. Nothing is computed, and no GPU
is needed: the model and one microbatch are looked at on tensors without memory. Exit codes: 0; 64 a problem of the
config (all are listed), or the run does not fit.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from mingpt.command import command, program
from mingpt.console import say
from mingpt.errors import FINISHED, USER_ERROR, UserError

if TYPE_CHECKING:
    from mingpt.config.schema import Config
    from mingpt.train.footprint import Footprint, Model

GB = 10**9
MFU = 0.4  # of the GPUs' peak, for the time that a run takes: what large models reach
ROOM = 0.05  # of a GPU's memory, for what the allocator can't use
ROWS = 1024  # of train.loss_rows, where it is proposed


def parser() -> argparse.ArgumentParser:
    from mingpt.config.commandline import Parser

    parser = Parser(prog=program("mingpt.commands.plan"), description=__doc__, allow_abbrev=False)
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="as for mingpt train")
    parser.add_argument("--gpus", metavar="NAME:N", help="of each node, such as L4:4")
    parser.add_argument("--num-nodes", type=int, metavar="N", default=1)
    parser.add_argument("--processes", type=int, metavar="N", help="of each node; without --gpus, on CPUs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


@command()
def plan_command(arguments: list[str]) -> int:
    options = parser().parse_intermixed_args(arguments)
    gpu, per_node = _machine(options)
    processes = per_node * options.num_nodes
    config = _config(options.overrides, processes)

    from mingpt.train.footprint import footprint, look_at

    model = look_at(config)
    found = footprint(config, model, processes, per_node)
    size, advice = found.total(bool(gpu)), None
    if gpu and size > _room(gpu):
        advice = _advice(config, model, gpu, options.num_nodes, per_node)
    if options.json:
        say(json.dumps(_plain(found, model, gpu, processes) | {"advice": advice}))
        return FINISHED if advice is None else USER_ERROR
    say("\n".join(_lines(config, found, model, gpu, options.num_nodes, per_node)))
    if gpu:
        say(_cost(config, model, gpu, processes))
        say(_verdict(size, gpu, advice))
    return FINISHED if advice is None else USER_ERROR


def _room(gpu: str) -> float:
    """Bytes of a GPU that a run can use."""
    from mingpt.observe.speed import GPUS

    return GPUS[gpu].memory * GB * (1 - ROOM)


def _cost(config: "Config", model: "Model", gpu: str, gpus: int) -> str:
    """How long the run takes at MFU of the peak, and what that costs."""
    from mingpt.model.kinds.language import Language
    from mingpt.observe.speed import GPUS, flops_per_token

    shape, steps = config.model, config.train.max_steps
    assert isinstance(shape, Language)
    tokens = steps * config.batch.global_size * shape.block_size
    flops = flops_per_token(model.parameters, shape.n_layer, shape.n_embd, shape.block_size)
    hours = tokens * flops / (GPUS[gpu].peak(config.precision) * MFU * gpus) / 3600
    price = config.run.price_per_hour
    cost = f", a cost of {price * hours:,.2f}" if price else "; run.price_per_hour=… tells the cost"
    return f"{steps:,} steps, {tokens:,} tokens: {hours:,.2f} hours at {MFU:.0%} of the peak (an estimate){cost}"


def _machine(options: argparse.Namespace) -> tuple[str, int]:
    """(the GPU's name, "" for none; processes on each node)."""
    if options.num_nodes < 1 or (options.processes or 1) < 1:
        raise UserError("--num-nodes and --processes: give numbers from 1")
    if not options.gpus:
        return "", options.processes or 1
    from mingpt.observe.speed import GPUS

    asked, _, number = options.gpus.partition(":")
    name = next((name for name in GPUS if name.upper() == asked.upper()), "")
    if not name:
        raise UserError(f"--gpus {options.gpus}: the memory of this GPU is not known here; there are {', '.join(GPUS)}")
    if not (number or "1").isdecimal() or int(number or 1) < 1:
        raise UserError(f"--gpus {options.gpus}: give NAME:NUMBER, such as L4:1")
    return name, options.processes or int(number or 1)


def _config(overrides: list[str], processes: int) -> "Config":
    from mingpt.config import compose
    from mingpt.model.kinds.language import Language

    named = any(word.startswith(("data", "experiment=", "+experiment=")) for word in overrides)
    config = compose.configure([*([] if named else ["data=random"]), *overrides], processes)
    if config is None:
        raise UserError("--cfg and --info are for `mingpt train`: leave them out")
    if not config.batch.micro_size:
        raise UserError("batch.micro_size=auto: a plan is made for a number: give one")
    if not isinstance(config.model, Language):
        raise UserError("model._target_: only this package's models can be planned, not a module of one's own")
    return config


def _advice(config: "Config", model: "Model", gpu: str, nodes: int, per_node: int) -> dict[str, Any]:
    """Settings with which it fits, by key, each of which helps; empty: none of those that were tried."""
    from mingpt.config.checks import impossible
    from mingpt.train.footprint import changed, footprint, look_at

    chosen, best = dict[str, Any](), footprint(config, model, nodes * per_node, per_node).total(True)
    for key, value in _moves(config, nodes):
        count = value if key == "--num-nodes" else nodes
        candidate = config if key == "--num-nodes" else changed(config, key, value)
        if (candidate == config and count == nodes) or any(impossible(candidate, count * per_node, set())):
            continue
        looked = model if key in ("--num-nodes", "optimizer.shard") else look_at(candidate)
        size = footprint(candidate, looked, count * per_node, per_node).total(True)
        if size < best:
            best, config, model, nodes = size, candidate, looked, count
            chosen[key] = value
        if best <= _room(gpu):
            return chosen
    return {}


def _moves(config: "Config", nodes: int) -> Iterator[tuple[str, Any]]:
    """What to try, on top of what has helped: first what leaves the bits as they are."""
    yield "optimizer.shard", True
    yield "train.recompute", "block"
    rows = config.batch.micro_size * config.model.block_size
    if rows > ROWS and not 0 < config.train.loss_rows <= ROWS:
        yield "train.loss_rows", ROWS
    for power in (1, 2, 3, 4):  # fewer samples need less for activations, more samples less for partial sums
        yield "batch.micro_size", max(1, config.batch.micro_size >> power)
    for power in (1, 2, 3):
        yield "--num-nodes", nodes << power
    for power in (1, 2, 3):
        yield "batch.micro_size", config.batch.micro_size << power


def _plain(found: "Footprint", model: "Model", gpu: str, processes: int) -> dict[str, Any]:
    """Bytes of the process that needs most, for JSON."""
    from mingpt.observe.speed import GPUS
    from mingpt.train.footprint import CONSTANT_CPU, CONSTANT_GPU

    size = found.total(bool(gpu))
    return {
        "parameters": model.parameters,
        "processes": processes,
        "microbatches of a process": found.own,
        "steady": found.steady,
        "gradients": model.gradients,
        "partial sums": _copies(found),
        "activations": found.kept,
        "logits": found.logits,
        "sent": int(found.stack.sent * model.gradients) if processes > 1 else 0,
        "received": int(found.stack.received * model.gradients),
        "phases": found.phases,
        "snapshots": found.staging,
        "gaps": 0 if gpu else found.gaps,
        "constant": CONSTANT_GPU if gpu else CONSTANT_CPU,
        "total": size,
        "of": GPUS[gpu].memory * GB if gpu else None,
        "fits": size <= _room(gpu) if gpu else None,
    }


def _copies(found: "Footprint") -> int:
    """The most copies of the gradients that a microbatch finds when its backward begins."""
    return max(found.stack.full or 0, found.stack.last)


def _lines(config: "Config", found: "Footprint", model: "Model", gpu: str, nodes: int, per_node: int) -> Iterator[str]:
    from mingpt.train.footprint import CONSTANT_CPU, CONSTANT_GPU

    processes, batch = nodes * per_node, config.batch
    where = f"{nodes} x {gpu}:{per_node}" if gpu else f"{nodes} x {per_node} processes on CPUs"
    yield (
        f"{model.parameters:,} parameters on {where}; {found.own} microbatches of {batch.micro_size} x "
        f"{config.model.block_size} tokens for each process"
    )
    yield ""
    yield f"of each {'GPU' if gpu else 'process'}:"
    for name, size in found.steady.items():
        yield _line(name, size)
    yield _line("the most of a step", found.step)
    for name, size in found.phases.items():
        yield _line(f"  {name}", size, inner=True)
    yield _line(
        f"    partial sums of gradients, {_copies(found)} at most", _copies(found) * model.gradients, inner=True
    )
    yield _line("    activations that backward needs", found.kept, inner=True)
    yield _line("    logits of one microbatch or piece", found.logits, inner=True)
    if processes > 1:
        yield _line("    gradients that are sent", int(found.stack.sent * model.gradients), inner=True)
        yield _line("    slices that are received", int(found.stack.received * model.gradients), inner=True)
    if not gpu:
        yield from (_line(name, size) for name, size in found.staging.items())
        yield _line("gaps between allocations", found.gaps)
    constant = "CUDA and NCCL (an estimate, not measured)" if gpu else "Python and torch"
    yield _line(constant, CONSTANT_GPU if gpu else CONSTANT_CPU)
    size = found.total(bool(gpu))
    yield _line("total", size)
    if gpu:
        yield ""
        yield "in the machine's memory, for each process:"
        yield from (_line(name, size) for name, size in found.staging.items())
    if config.snapshot.hot_every_steps:
        yield f"two hot snapshots in {config.snapshot.hot_dir} of each node:"
        yield _line("files", 2 * (found.steady["weights"] + found.moments))


def _line(name: str, size: float, inner: bool = False) -> str:
    """inner: a part of the line above, which does not count by itself."""
    return f"  {name:<52}{'' if inner else '  '}{size / GB:8.2f} GB".rstrip()


def _verdict(size: int, gpu: str, advice: dict[str, Any] | None) -> str:
    from mingpt.observe.speed import GPUS

    memory = GPUS[gpu].memory
    if advice is None:
        return f"fits into a {gpu} of {memory} GB: {1 - size / (memory * GB):.0%} are free"
    words = " ".join(f"{key} {value}" if key[:2] == "--" else f"{key}={value}" for key, value in advice.items())
    cure = f"with {words.replace('True', 'true')} it does" if advice else "no setting that was tried makes it fit"
    return f"does not fit into a {gpu} of {memory} GB (with {ROOM:.0%} free): {cure}"


def main() -> NoReturn:
    sys.exit(plan_command(sys.argv[1:]))
