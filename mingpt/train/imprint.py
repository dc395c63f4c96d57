"""What a step computes, as hashes of its bits: its samples, each module's output, each gradient, the state after it.

Nothing is kept but 32 bytes for each name, so it takes no more memory than the step itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from mingpt.train.audit import FIRST, gradient_hash
from mingpt.train.bench import Bench
from mingpt.train.replaying import Again, Replay

NARROW = {1: torch.int8, 2: torch.int16}

Hashes = dict[str, str]  # by name


@dataclass(frozen=True)
class Imprint:
    """The hashes of one step. inputs, outputs: by module, in the order of execution.

    gradients: by parameter, in the order of backward. samples: by position in the batch. state: after the
    step. The hashes of a step's microbatches are folded into one.
    """

    again: Again
    samples: Hashes
    inputs: Hashes
    outputs: Hashes
    gradients: Hashes
    state: Hashes


class _Folded:
    """Hashes by name, in the order of the names' first appearance, without waiting for the device."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def add(self, name: str, value: Any) -> None:
        for tensor in _tensors(value):
            one = gradient_hash(_bits(tensor))
            self.found[name] = self.found[name] * FIRST + one if name in self.found else one

    def hashes(self) -> Hashes:
        return {name: str(total.tolist()) for name, total in self.found.items()}


def imprint(run: Replay) -> Imprint:
    """Do the next step of `run`."""
    run.prepare()
    bench = run.bench
    samples = _samples(bench, run.step)
    inputs, outputs, gradients = _Folded(), _Folded(), _Folded()
    with _watched(bench, inputs, outputs, gradients):
        again = run.advance()
    return Imprint(again, samples, inputs.hashes(), outputs.hashes(), gradients.hashes(), state_of(bench))


def state_of(bench: Bench) -> Hashes:
    found = _Folded()
    for tensors in bench.state().values():
        for name in sorted(tensors):
            found.add(name, tensors[name])
    return found.hashes()


@contextmanager
def _watched(bench: Bench, inputs: _Folded, outputs: _Folded, gradients: _Folded) -> Iterator[None]:
    """With train.compile the modules are no longer apart: only gradients are seen."""

    def seen(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, given: Any, output: Any) -> None:
            inputs.add(name, given)
            outputs.add(name, output)

        return hook

    model = bench.context.model
    apart = {} if bench.config.train.compile else {n: m for n, m in model.named_modules() if n}
    hooks = [module.register_forward_hook(seen(name)) for name, module in apart.items()]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            hooks.append(parameter.register_hook(lambda gradient, name=name: gradients.add(name, gradient)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _samples(bench: Bench, step: int) -> Hashes:
    numbers, found = bench.context.plan.sample_ids(step).tolist(), Hashes()
    for microbatch in bench.microbatches(step):
        for i in range(len(microbatch[0])):
            rows = (t[i : i + 1].contiguous().view(torch.uint8).numpy().tobytes() for t in microbatch)
            position = len(found)
            found[f"position {position} (sample {numbers[position]:,})"] = sha256(b"".join(rows)).hexdigest()
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (t for v in value.values() for t in _tensors(v))
    elif isinstance(value, tuple | list):
        yield from (t for v in value for t in _tensors(v))


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().flatten()
    narrow = NARROW.get(flat.element_size())
    return flat.view(narrow).to(torch.int32) if narrow else flat.view(torch.int32)
