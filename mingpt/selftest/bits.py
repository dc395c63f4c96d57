"""One process of `mingpt selftest`: known steps over and over, and whether each has the same bits every time.

A case is one step: a microbatch's forward and backward, and an update. Its digest is a function of the kind of machine
and torch's version. The command starts one such process a core or a GPU, so that all are busy meanwhile.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mingpt import NUMERICS
from mingpt.compute import numerics
from mingpt.compute.buckets import CHUNK, make_buckets
from mingpt.compute.groups import muon_names, roles, rules
from mingpt.compute.optimizer import Update, pairwise_sum, sums_of_squares
from mingpt.compute.reduction import ExactReduction
from mingpt.config import compose
from mingpt.observe.speed import peak_flops
from mingpt.train import factory
from mingpt.world.world import World

FEWEST = 3  # repetitions of a case, whatever the time
MODELS = {"gpt2": ["model=gpt-nano"], "modern": ["model=modern-nano", "optimizer=muon"]}
PRECISIONS = ("fp32", "bf16", "fp16")
# On a CPU small, since many CPUs emulate bf16 and fp16; on a GPU wide enough for its large kernels.
SHAPES = {
    "cpu": (["model.n_layer=2", "model.n_head=2", "model.n_embd=32", "model.block_size=32"], 2),
    "cuda": (["model.n_layer=2", "model.n_head=12", "model.n_embd=768", "model.block_size=512"], 8),
}
KERNELS = {
    "cpu": (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION),
    "cuda": (
        SDPBackend.MATH,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ),
}
VOCABULARY = 64
Case = Callable[[], str]  # does the work, and returns its digest


def digest(tensors: Sequence[Tensor]) -> str:
    content = sha256()
    for tensor in tensors:
        content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()[:16]


def step_case(model_name: str, precision: str, kernel: SDPBackend, compiled: bool, device: torch.device) -> Case:
    """A step from the same weights each time. Its digest is of the loss, the gradients and the new weights."""
    shape, micro = SHAPES[device.type]
    overrides = [*MODELS[model_name], *shape, f"precision={precision}", f"train.compile={str(compiled).lower()}"]
    config = compose.configure([*overrides, "data=addition", "train.threads=1", "run.dir=selftest"], 1)
    assert config
    numerics.pin(config, device)
    model = factory.build(config, VOCABULARY)
    for parameter in model.parameters():  # some begin as zeros, behind which nothing has a gradient
        torch.nn.init.normal_(parameter, std=0.05)
    model.to(device)
    named, role_of, alone = list(model.named_parameters()), roles(model), World(0, 1, 0, device, "gloo")
    buckets = make_buckets(named, muon_names(config.optimizer.name, role_of), alone, shard=False)
    reduction = ExactReduction(buckets, 1, alone)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    if compiled:
        model.compile()
    text = torch.randint(VOCABULARY, (micro, config.model.block_size + 1), generator=torch.Generator().manual_seed(1))
    tokens, targets = text[:, :-1].to(device), text[:, 1:].to(device)

    def work() -> str:
        numerics.pin(config, device)  # the case before may be of another precision
        model.load_state_dict(start)
        update = Update(
            buckets,
            rules(named, config.optimizer, role_of),
            config.optimizer,
            config.schedule,
            alone,
            global_size=micro,
            tokens_per_microbatch=targets.numel(),
            fp16=precision == "fp16",
            health=config.health,
        )
        reduction.begin()
        reduction.arm(0)
        # A compiled model takes the kernel that it was compiled with.
        with sdpa_kernel(kernel) if not compiled else nullcontext(), numerics.autocast_for(config, device):
            loss, count = model(tokens, targets)
            update.scaled(loss).backward()
        reduction.finish()
        update(config.schedule.warmup_steps, loss.double()[None], count, reduction.sums)
        return digest([loss, *reduction.sums, *(p for _, p in update.named)])

    return work


def norm_case(device: torch.device) -> Case:
    """The norm that clipping uses, of a tensor that starts at another address each time."""
    numbers = torch.randn(2 * CHUNK, generator=torch.Generator().manual_seed(1)).to(device)
    buffer, calls = torch.empty(len(numbers) + 4, device=device), iter(range(sys.maxsize))

    def work() -> str:
        offset = next(calls) % 4
        view = buffer[offset : offset + len(numbers)]
        view.copy_(numbers)
        return digest([pairwise_sum(sums_of_squares(view)[None])])

    return work


def cases(device: torch.device, compiled: bool) -> dict[str, Callable[[], Case]]:
    """By name; what builds each one."""
    found: dict[str, Callable[[], Case]] = {"norm at four offsets": partial(norm_case, device)}
    for model in MODELS:
        for precision in (*PRECISIONS, *(["tf32"] if device.type == "cuda" and torch.cuda.is_tf32_supported() else [])):
            for kernel in KERNELS[device.type]:
                name = f"{model} {precision} {kernel.name.lower().removesuffix('_attention')}"
                found[name] = partial(step_case, model, precision, kernel, False, device)
        if compiled:
            found[f"{model} fp32 compiled"] = partial(step_case, model, "fp32", SDPBackend.MATH, True, device)
    return found


def shuffle(held: list[Tensor], device: torch.device, generator: torch.Generator) -> None:
    """Allocate and free blocks of random sizes, so that the next step's tensors lie elsewhere."""
    for size in torch.randint(1, 1 << 18, (8,), generator=generator).tolist():
        held.append(torch.empty(size, device=device))
    del held[:: 2 + len(held) % 3]


def repeat(all_cases: dict[str, Callable[[], Case]], device: torch.device, seconds: float) -> dict[str, Any]:
    """{"digests": {case: {digest: how often}}, "absent": {case: why}}, in turns until the time is over."""
    works, absent = dict[str, Case](), dict[str, str]()
    counts: dict[str, dict[str, int]] = {}
    held, generator, until = list[Tensor](), torch.Generator().manual_seed(1), time.monotonic() + seconds
    for name, make in all_cases.items():
        try:
            works[name] = make()
            works[name]()
        except RuntimeError as error:  # torch has no such kernel for this device, precision or head size
            works.pop(name, None)
            absent[name] = str(error).splitlines()[0][:100]
    rounds = 0
    while rounds < FEWEST or time.monotonic() < until:
        for name, work in works.items():
            shuffle(held, device, generator)
            found = work()
            counts.setdefault(name, {})[found] = counts.get(name, {}).get(found, 0) + 1
        rounds += 1
    return {"digests": counts, "absent": absent}


def about(device: torch.device) -> dict[str, Any]:
    """The kind of machine that digests belong to, and what it could compute in a second."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    kind: dict[str, Any] = {"device": name, "probe": numerics.probe(device), "numerics": NUMERICS}
    kind["cpu"] = None if cuda else numerics.cpu_vendor()
    versions: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda if cuda else None}
    if cuda:
        versions["gpu"] = numerics.gpu(device)
    return {**kind, **versions, "peak": {p: peak_flops(device, p) for p in ("fp32", "bf16")}}


def main() -> None:
    """Arguments: cpu or cuda:N, seconds, and whether compiled steps are cases. Prints one JSON line."""
    name, seconds, compiled = sys.argv[1:]
    device = torch.device(name)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    found = repeat(cases(device, compiled == "compiled"), device, float(seconds))
    print(json.dumps({**found, "about": about(device)}), flush=True)


if __name__ == "__main__":
    main()
