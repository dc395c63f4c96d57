"""Models, data, observers, schedules and optimizers of a user's own, most wrong in one way: what `_target_` names."""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from examples.classifier import Classifier, rows
from mingpt.data.own import Rows, source_of
from mingpt.data.source import Source
from mingpt.data.vocabulary import Numbers
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.language import IGNORE
from mingpt.observe.events import Event, StepDone
from tests.kits.run_kit import Run

CLASSIFIER = ("model._target_=examples.classifier.Classifier", "data._target_=examples.classifier.rows")


class Linear(nn.Module):
    """A classifier with nothing wrong; most of those below are this one, with one fault."""

    def __init__(self, n_in: int = 10) -> None:
        super().__init__()
        self.layer = nn.Linear(n_in, 2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.cross_entropy(self.layer(x), y, reduction="sum"), (y >= 0).sum()


class Laid(nn.Module):
    """A convolution and a matrix whose memory lies in another order than their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, padding=1)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.out = nn.Parameter((torch.randn(2, 30) * 0.1).t())

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.conv(x.view(-1, 2, 1, 5))).flatten(1)
        return nn.functional.cross_entropy(hidden @ self.out, y, reduction="sum"), (y >= 0).sum()


ODD: dict[str, Callable[[], tuple[str, Any]]] = {  # what no model may have
    "lazy": lambda: ("extra", nn.LazyLinear(2)),
    "complex": lambda: ("z", nn.Parameter(torch.zeros(2, dtype=torch.complex64))),
    "reserved": lambda: ("loss_scale", nn.Parameter(torch.zeros(10))),
    "expanded": lambda: ("shift", nn.Parameter(torch.zeros(1).expand(10))),
}


def odd(what: str) -> nn.Module:
    """A model with a parameter or a layer that no model may have, by its name in ODD."""
    model = Linear()
    setattr(model, *ODD[what]())
    return model


class Sparse(Linear):
    """Has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Embedding(2, 2, sparse=True)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layer(x) + self.shift(torch.zeros_like(y))
        return nn.functional.cross_entropy(logits, y, reduction="sum"), (y >= 0).sum()


class Rare(Linear):
    """Some microbatches do not use a layer, and some use nothing. right: the same function, of all parameters."""

    def __init__(self, right: bool = False) -> None:
        super().__init__()
        self.right, self.extra = right, nn.Linear(10, 2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        uses_extra, uses_any = x[0, 0] < 0.5, x[0, 0] < 1.5
        logits = self.layer(x)
        if self.right or uses_extra:
            logits = logits + self.extra(x) * uses_extra
        loss = nn.functional.cross_entropy(logits, y, reduction="sum")
        if not (self.right or uses_any):
            return torch.zeros(()), torch.zeros(())
        return loss * uses_any, (y >= 0).sum() * uses_any


class Noisy(Linear):
    """Draws random numbers whenever it is asked, as a denoiser does."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x + torch.randn_like(x), y)


class LateBuffer(Linear):
    """With a running mean, from a later call on."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("mean", torch.full((10,), float("nan")), persistent=persistent)
        self.register_buffer("fixed", torch.full((10,), float("nan")))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls > 20:
            self.mean = x.detach().mean(0)
        return super().forward(x, y)


def refuse(gradient: Tensor) -> None:
    """Fail in backward."""
    raise RuntimeError("x does not have a deterministic implementation")  # as torch says on CUDA


FAULTS: dict[str, Callable[[Tensor, Tensor], object]] = {  # what forward returns, of its loss and its count
    "infinite": lambda loss, count: (loss * float("inf"), count),
    "uncounted": lambda loss, count: (loss, count * float("nan")),
    "one_tensor": lambda loss, count: loss,
    "means": lambda loss, count: (loss, 2),
    "refuses": lambda loss, count: loss.register_hook(refuse) and (loss, count),
    "quits": lambda loss, count: sys.exit(0),
}


class Faulty(Linear):
    """Returns something wrong from forward, by its name in FAULTS."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return FAULTS[self.fault](*super().forward(x, y))


class NoForward(nn.Module):
    """Has no forward."""


class Idle(Linear):
    """Has a layer on which the loss does not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


class Normed(Linear):
    """Changes buffers in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(self.norm(x), y)


class QuitsLater(Classifier):
    """In a call after those with which it is tried out."""

    calls = 0

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls == 8:
            raise SystemExit(0)
        return super().forward(x, y)


Identity = nn.Identity  # without a parameter


def gives_none() -> None:
    """Return no model."""
    return None


def fails(hidden: int) -> nn.Module:
    """Raise an error."""
    raise ValueError(f"{hidden} is odd")


def takes_all(**_: object) -> nn.Module:
    """Fails, whatever its arguments are."""
    raise ValueError("whatever it is given")


def derived(vocab_size: int, block_size: int) -> nn.Module:
    """A class of somebody's own, over one of ours."""

    class Mine(GPT):
        pass

    return Mine(GPTConfig(vocab_size=vocab_size, block_size=block_size, n_layer=1, n_head=1, n_embd=8))


def no_rows(micro_size: int) -> Source:
    """A data set without a sample."""
    return source_of((torch.zeros(0, 10),), (torch.zeros(0, 10),), micro_size)


def masked(micro_size: int, train: int, validation: int, **_: Any) -> Source:
    """Texts of which only so many samples have a target."""
    tokens = torch.arange(64 * 16).view(64, 16) % 7
    some = [(tokens, tokens.masked_fill(torch.arange(64)[:, None] >= n, IGNORE)) for n in (train, validation)]
    return source_of(some[0], some[1], micro_size, Numbers(7))


def uneven(micro_size: int) -> Source:
    """A data set of three inputs and two targets."""
    return source_of((torch.zeros(3, 10), torch.zeros(2)), (torch.zeros(0, 10), torch.zeros(0)), micro_size)


@dataclass
class OwnRun(Run):
    """A model and data of one's own, in a folder of its own; by default the classifier, with dropout."""

    code: tuple[str, ...] = ("experiment=classifier", "model.dropout=0.1", "data.count=300")

    def arguments(self, *overrides: str) -> list[str]:
        return [
            *self.code, f"run.dir={self.dir}",
            "batch.global_size=12", "batch.micro_size=2", "train.max_steps=24", "train.log_every=1",
            "train.eval_every=8", "snapshot.every_steps=4", "snapshot.every_seconds=0", "snapshot.keep=10",
            "snapshot.asynchronous=false", "snapshot.hot_every_steps=0", *self.overrides, *overrides,
        ]  # fmt: skip


def own_run(folder: Path, model: str, *overrides: str) -> OwnRun:
    """A run of one of the models in here on the classifier's rows."""
    code = (f"model._target_=tests.kits.own_kit.{model}", "data._target_=examples.classifier.rows", "data.count=300")
    return OwnRun(str(folder), Path(), Path(), overrides, {"PYTHONPATH": "."}, code)


def rows_from_anywhere(micro_size: int, **_: object) -> Source:
    """Takes any arguments: addresses, tokens and the like."""
    return rows(n_in=10, count=64, micro_size=micro_size)


class Hanging(Rows):
    """Rows with which rank 1 holds the interpreter lock for ever at its 40th microbatch."""

    left = 40

    def __getitem__(self, ids: Sequence[int]) -> Sequence[Tensor]:  # type: ignore[override]
        self.left -= 1
        if self.left == 0 and os.environ["RANK"] == "1":
            ctypes.PyDLL(None).sleep(1000)  # PyDLL does not release it
        return super().__getitem__(ids)


def hangs(micro_size: int) -> Source:
    """The classifier's rows; rank 1 hangs on them (see Hanging)."""
    source = rows(micro_size, count=300)
    assert isinstance(source.train, Rows)
    return replace(source, train=Hanging(*source.train.tensors))


class Sleeping(Linear):
    """At its 20th microbatch every process sleeps for longer than a test waits, as one waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls == 20:
            print(f"asleep: rank {os.environ['RANK']}", flush=True)
            time.sleep(600)
        return super().forward(x, y)


SEEN: list[Event] = []  # by observers of this process


class Recorder:
    """An observer that keeps each event in SEEN."""

    def on(self, event: Event) -> None:
        SEEN.append(event)


class Fails:
    """An observer that fails at each step."""

    def on(self, event: Event) -> None:
        if isinstance(event, StepDone):
            raise ValueError(f"step {event.step} is not to its taste: https://user:S3CRET@example.com/")


class Quits:
    """An observer that quits at each event."""

    def on(self, event: Event) -> None:
        sys.exit(0)


class Hangs:
    """An observer that hangs at its first event."""

    def on(self, event: Event) -> None:
        threading.Event().wait()


class NotMade:
    """An observer that can't be made."""

    def __init__(self, run_dir: str, reason: str = "no reason") -> None:
        raise OSError(reason)

    def on(self, event: Event) -> None: ...


def without_step(warmup_steps: int) -> float:
    """A schedule that does not take the step."""
    return 1.0


def by_chance(step: int) -> float:
    """A schedule that gives another number each time."""
    return time.perf_counter()


def falls_below(step: int, by: float) -> float:
    """A schedule that falls below zero."""
    return 1 - by * step


def divides(step: int) -> float:
    """A schedule that fails at step 3."""
    return abs(1 / (step - 3))


class Sgd:
    """An optimizer that is right; those below are wrong in one way."""

    elementwise = True

    def state(self, shape: torch.Size) -> dict[str, Sequence[int]]:
        return {"mean": shape}

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Tensor], *, step: int, lr: float, weight_decay: float
    ) -> None:
        param.sub_(grad, alpha=lr)


class ByNorm(Sgd):
    """Says that it is elementwise, and is not."""

    def update(self, param: Tensor, grad: Tensor, *_: Any, lr: float, **__: Any) -> None:
        param.sub_(grad / grad.norm(), alpha=lr)


class Random(Sgd):
    """Draws random numbers."""

    def update(self, param: Tensor, grad: Tensor, *_: Any, lr: float, **__: Any) -> None:
        param.sub_(torch.randn_like(param), alpha=lr)


class Remembers(Sgd):
    """Keeps a state beside what it gives to be kept."""

    elementwise = False
    calls = 0

    def update(self, param: Tensor, grad: Tensor, *_: Any, lr: float, **__: Any) -> None:
        self.calls += 1
        param.sub_(grad, alpha=lr / self.calls)


class Summed(Sgd):
    """Says that it is elementwise, and has a state of another shape than its tensor's."""

    def state(self, shape: torch.Size) -> dict[str, Sequence[int]]:
        return {"sum": []}


class Listed(Sgd):
    """Gives its state as a list."""

    def state(self, shape: torch.Size) -> Any:
        return ["mean"]


class OldForm(Sgd):
    """Takes other arguments than it is given."""

    def update(self, param: Tensor, grad: Tensor) -> None:  # type: ignore[override]
        pass


class Forgets(Sgd):
    """Takes its state away."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Tensor], **_: Any) -> None:
        state.clear()


Torchs = torch.optim.SGD
