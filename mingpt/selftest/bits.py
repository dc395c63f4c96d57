"""One process of `mingpt selftest`: known steps over and over, and whether each has the same bits every time.

A case is one step: a microbatch's forward and backward, and an update. Its digest is a function of the kind of machine
and torch's version. The command starts one such process a core or a GPU, so that all are busy meanwhile.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mingpt.cli.console import complain, counted
from mingpt.compose import compose
from mingpt.compute import numerics
from mingpt.compute.batches import BatchPlan
from mingpt.compute.buckets import CHUNK
from mingpt.compute.optimizer import pairwise_sum, sums_of_squares
from mingpt.snapshot.tries import use_device
from mingpt.train.context import make_context
from mingpt.train.factory import build
from mingpt.train.preparing import prepare
from mingpt.train.step import train_step
from mingpt.world.lifetime import end_with_parent
from mingpt.world.world import World

FEWEST = 3  # repetitions of a case, whatever the time
MODELS = {"gpt2": ["model=gpt-nano"], "modern": ["model=modern-nano", "optimizer=muon"]}
PRECISIONS = ("fp32", "bf16", "fp16")
# On a CPU small, since many CPUs emulate bf16 and fp16; on a GPU wide enough for its large kernels.
SHAPES = {
    "cpu": (["model.n_layer=2", "model.n_head=2", "model.n_embd=32", "model.block_size=32"], 2),
    "cuda": (["model.n_layer=2", "model.n_head=12", "model.n_embd=768", "model.block_size=512"], 8),
}
ON_CPUS = ("MATH", "FLASH_ATTENTION")
KERNELS = {"cpu": ON_CPUS, "cuda": (*ON_CPUS, "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")}
VOCABULARY = 64
Case = Callable[[], str]  # does the work, and returns its digest
Cases = dict[str, Callable[[], Case]]  # by name; what builds each one


def step_case(model_name: str, precision: str, kernel: str | None, device: torch.device) -> Case:
    """A step from the same weights each time. Its digest is of the loss, the gradients and the new weights.

    kernel: of attention; None: the step is compiled, as training compiles it.
    """
    shape, micro = SHAPES[device.type]
    how = [f"batch.micro_size={micro}", f"batch.global_size={micro}", f"precision={precision}", "train.threads=1"]
    compiled = f"train.compile={str(kernel is None).lower()}"
    config = compose.configure([*MODELS[model_name], *shape, *how, compiled, "data=random", "run.dir=selftest"])
    numerics.pin(config, device)
    model = build(config, VOCABULARY)
    # Some begin as zeros, and what lies behind a weight of zeros gets no gradient: wrong bits there would not be seen.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    prepare(config, model)
    world, plan = World(0, 1, 0, device, "gloo"), BatchPlan(micro, config.seed, micro, micro)
    context = make_context(config, model, plan, world, numerics.autocast_for(config, device))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = {name: value.clone() for name, value in context.update.state().items() if isinstance(value, Tensor)}
    text = torch.randint(VOCABULARY, (micro, config.model.block_size + 1), generator=torch.Generator().manual_seed(1))
    tokens, targets = text[:, :-1].to(device), text[:, 1:].to(device)

    def work() -> str:
        numerics.pin(config, device)  # the case before may be of another precision
        model.load_state_dict(weights)
        context.update.load(optimizer)
        # No state here, so `load` leaves it: after health.max_skips of losses that are not finite, no step is done.
        context.update.guard.skips.zero_()
        with sdpa_kernel(getattr(SDPBackend, kernel)) if kernel else nullcontext():
            stats = train_step(context, config.schedule.warmup_steps, iter([(tokens, targets)]))
        slots = sorted(context.update.slots.items())
        # As the model gives it: the exchange has made it float64.
        loss = stats.losses.float()
        return numerics.digest([loss, *context.reduction.sums, *(slot.parameter for _, (_, slot) in slots)])

    return work


def norm_case(device: torch.device) -> Case:
    """The norm that clipping uses, of a tensor that starts at another address each time."""
    numbers = torch.randn(2 * CHUNK, generator=torch.Generator().manual_seed(1)).to(device)
    buffer, calls = torch.empty(len(numbers) + 4, device=device), iter(range(sys.maxsize))

    def work() -> str:
        offset = next(calls) % 4
        view = buffer[offset : offset + len(numbers)]
        view.copy_(numbers)
        return numerics.digest([pairwise_sum(sums_of_squares(view)[None])])

    return work


def cases(device: torch.device, compiled: bool) -> Cases:
    """By name; what builds each one."""
    found: Cases = {"norm at four offsets": partial(norm_case, device)}
    precisions = list(PRECISIONS)
    if device.type == "cuda" and torch.cuda.is_tf32_supported():
        precisions.append("tf32")
    for model, precision in product(MODELS, precisions):
        kernels: list[str | None] = [*KERNELS[device.type]]
        # They are slow to begin, two minutes and more in all on a GPU, so only two precisions have them.
        if compiled and precision in ("fp32", "bf16"):
            kernels.append(None)
        for kernel in kernels:
            kind = kernel.lower().removesuffix("_attention") if kernel else "compiled"
            found[f"{model} {precision} {kind}"] = partial(step_case, model, precision, kernel, device)
    return found


def repeat(all_cases: Cases, device: torch.device, seconds: float, limit: float) -> dict[str, Any]:
    """{"digests": {case: {digest: how often}}, "absent": {case: why}}, in turns until the time is over.

    limit: seconds; cases that have not begun by then are absent (all but the first), and no case is repeated any more.
    """
    works = dict[str, Case]()
    counts = dict[str, Counter[str]]()
    absent = dict[str, str]()
    held = list[Tensor]()
    generator = torch.Generator().manual_seed(1)
    begun = time.monotonic()
    rounds = 1
    for number, (name, make) in enumerate(all_cases.items(), 1):
        if works and time.monotonic() >= begun + limit:
            absent[name] = f"not done within {limit:g} s (--limit)"
            continue
        complain(f"case {number} of {len(all_cases)}: {name}")
        try:
            work = make()
            counts[name] = Counter([work()])
            works[name] = work
        except RuntimeError as error:  # torch has no such kernel for this device, precision or head size
            absent[name] = f"not here: {str(error).splitlines()[0][:100]}"
    complain(f"{counted(len(works), 'case')} again, for {seconds:g} s in all")
    while time.monotonic() < begun + (max(seconds, limit) if rounds < FEWEST else seconds):
        for name, work in works.items():
            # Blocks of random sizes are allocated and freed, so that the next step's tensors lie elsewhere.
            sizes = torch.randint(1, 1 << 18, (8,), generator=generator).tolist()
            held = [*held[:: 2 + rounds % 3], *(torch.empty(size, device=device) for size in sizes)]
            counts[name][work()] += 1
        rounds += 1
    return {"digests": counts, "absent": absent}


def main() -> None:
    """Arguments: seconds, limit, whether compiled steps are cases, the parent, cpu or cuda:N. Prints one JSON line."""
    seconds, limit, compiled, parent, name = sys.argv[1:]
    end_with_parent(int(parent))
    device = torch.device(name)
    torch.set_num_threads(1)
    use_device(device)
    found = repeat(cases(device, compiled == "True"), device, float(seconds), float(limit))
    probe = {"probe": None} if name != "cpu" else {}  # of a GPU: one that computes wrongly must not be another kind
    print(json.dumps({**found, "machine": numerics.machine(device) | probe}))


if __name__ == "__main__":
    main()
