"""A step under the lens: its loss by sample, its gradient and update by layer, what comes out of its modules."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt.model.language import IGNORE, LanguageModel
from mingpt.replay.bench import Bench
from mingpt.train.figures import Figures

LAYER = re.compile(r"(.*?\.\d+)\..+")


@dataclass(frozen=True)
class Sample:
    """One sample of a step's batch."""

    # In the batch, and in the training set.
    position: int
    number: int
    # Its mean, in nats a target; NaN without targets.
    loss: float
    # Their number, or the sum of their weights.
    targets: float
    # Its row, and the last target where there is one.
    tokens: list[int]


@dataclass(frozen=True)
class Layer:
    """A layer in one step."""

    name: str
    # The gradient's norm before clipping.
    gradient: float
    # The norm of the change of the weights, and as a share of theirs.
    update: float
    ratio: float
    # The largest absolute value that comes out; NaN of a layer that is no module of its own.
    activation: float


def look(bench: Bench, step: int, drop: frozenset[int] = frozenset()) -> tuple[list[Sample], dict[str, float]]:
    """Step number `step`, counted from 0, before it is done: its samples; by module the largest value that comes out.

    A forward with the step's own dropout, which changes nothing. Of a model that is no language model the loss by
    sample is not known: there are no samples.
    """
    ids = bench.context.plan.sample_ids(step).tolist()
    model, samples = bench.context.model, list[Sample]()
    largest = dict[str, Tensor]()

    def note(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            found = output[0] if isinstance(output, tuple) and output else output
            if isinstance(found, Tensor) and found.is_floating_point() and found.numel():
                value = found.detach().abs().max().float()
                largest[name] = torch.maximum(largest[name], value) if name in largest else value

        return hook

    # A hook a module, on the device until the end: a number that is read in between would wait for it each time.
    hooks = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    model.train()
    try:
        with torch.no_grad(), bench.context.autocast:
            for m, microbatch in enumerate(bench.microbatches(step, drop)):
                tensors = bench.to_device(microbatch)
                bench.seed(step, m)
                if isinstance(model, LanguageModel):
                    rows = _losses(model.loss_and_logits(*tensors)[2], tensors)
                    for i, (total, count) in enumerate(rows):
                        position, mean = len(samples), total / count if count else math.nan
                        samples.append(Sample(position, ids[position], mean, count, _row(microbatch, i)))
                else:
                    model(*tensors)
    finally:
        for hook in hooks:
            hook.remove()
    return samples, {name: value.item() for name, value in largest.items()}


def _losses(logits: Tensor, tensors: list[Tensor]) -> list[tuple[float, float]]:
    """For each row, the sum of its losses, and the number of its targets or the sum of their weights."""
    targets = tensors[1]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
    weights = tensors[2] if len(tensors) > 2 else torch.ones_like(losses).view_as(targets)
    counted = weights * (targets != IGNORE)
    totals = (losses.view_as(targets) * weights).double().sum(1)
    return list(zip(totals.tolist(), counted.double().sum(1).tolist(), strict=True))


def _row(microbatch: tuple[Tensor, ...], i: int) -> list[int]:
    tokens, last = microbatch[0][i].tolist(), int(microbatch[1][i, -1])
    return [*tokens, *([last] if last != IGNORE else [])]


def layers(bench: Bench, before: dict[str, Tensor], figures: Figures, largest: dict[str, float]) -> list[Layer]:
    """Describe each layer in the step that `bench` has just done, in order.

    before: the weights before it. largest: as `look` has found it.
    """
    clip, rows = clip_factor(bench, figures), list[Layer]()
    named = [(name, p) for name, p in bench.context.model.named_parameters() if p.requires_grad]
    for name, group in groupby(named, lambda item: layer_of(item[0])):
        parameters = list(group)
        # What is left after the step was clipped, so the factor is taken out again.
        gradient = _norm([bench.gradient(n) for n, _ in parameters]) / clip if clip else math.nan
        old = [before[n].to(p.device) for n, p in parameters]
        size = _norm(old)
        update = _norm([p.detach() - o for (_, p), o in zip(parameters, old, strict=True)])
        ratio = update / size if size else math.nan
        rows.append(Layer(name, gradient, update, ratio, largest.get(name, math.nan)))
    return rows


def clip_factor(bench: Bench, figures: Figures) -> float:
    """The factor by which the gradient was clipped to optimizer.clip_norm; 1: it was not clipped."""
    longest = bench.config.optimizer.clip_norm
    # The same formula as Update's, which is torch's clip_grad_norm_.
    return min(1.0, longest / (figures.grad_norm + 1e-6)) if longest else 1.0


def layer_of(parameter: str) -> str:
    """The block that a parameter is in, or the module."""
    block = LAYER.fullmatch(parameter)
    return block[1] if block else parameter.rpartition(".")[0] or parameter


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))
