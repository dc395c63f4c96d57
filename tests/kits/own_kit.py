"""Models and data of somebody's own, most of them wrong in one way, for tests/train/test_own_model.py."""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from examples.classifier import Classifier, rows
from mingpt.data.own import Rows, source_of
from mingpt.data.source import Source
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.observe.events import AttemptEnded, AttemptFailed, Event
from mingpt.observe.jsonl import MetricsLog
from mingpt.train import stats
from run_kit import Run

CLASSIFIER = ("model._target_=examples.classifier.Classifier", "data._target_=examples.classifier.rows")


class Linear(nn.Module):
    def __init__(self, n_in: int = 10) -> None:
        super().__init__()
        self.layer = nn.Linear(n_in, 2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.cross_entropy(self.layer(x), y, reduction="sum"), (y >= 0).sum()


class Laid(nn.Module):
    """A convolution and a matrix whose memory may lie in another order than their elements."""

    def __init__(self, strided: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, padding=1)
        self.out = nn.Parameter(torch.randn(30, 2) * 0.1)
        if strided:
            self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.out = nn.Parameter(self.out.detach().t().contiguous().t())

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.conv(x.view(-1, 2, 1, 5))).flatten(1)
        return nn.functional.cross_entropy(hidden @ self.out, y, reduction="sum"), (y >= 0).sum()


class Expanded(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1).expand(10))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x + self.shift, y)


class Gaps(Expanded):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(20)[::2])


class Scaled(Expanded):
    """With a parameter whose name in a snapshot is that of a tensor of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        del self.shift
        self.loss_scale = nn.Parameter(torch.zeros(10))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return Linear.forward(self, x + self.loss_scale, y)


class Sparse(Linear):
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


class Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError("x does not have a deterministic implementation")  # as torch says on CUDA


FAULTS: dict[str, Callable[[Tensor, Tensor], object]] = {  # what forward returns, of its loss and its count
    "infinite": lambda loss, count: (loss * float("inf"), count),
    "uncounted": lambda loss, count: (loss, count * float("nan")),
    "one_tensor": lambda loss, count: loss,
    "means": lambda loss, count: (loss, 2),
    "refuses": lambda loss, count: (Refused.apply(loss), count),
    "unlucky": lambda loss, count: dict[str, int]()["no luck"],
    "quits": lambda loss, count: sys.exit(0),
}


class Faulty(Linear):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return FAULTS[self.fault](*super().forward(x, y))


class NoForward(nn.Module):
    pass


class Idle(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


class Normed(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(self.norm(x), y)


class Complex(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


class QuitsLater(Classifier):
    """In a call after those with which it is tried out."""

    calls = 0

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls == 8:
            raise SystemExit(0)
        return super().forward(x, y)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.cross_entropy(self.layer(x), y, reduction="sum"), (y >= 0).sum()


Identity = nn.Identity  # without a parameter


def gives_none() -> None:
    return None


def fails(hidden: int) -> nn.Module:
    raise ValueError(f"{hidden} is odd")


def quits() -> nn.Module:
    raise SystemExit(0)


def by_vocabulary(vocab_size: int, block_size: int) -> nn.Module:
    return Classifier(n_in=10, hidden=vocab_size + block_size)


def derived(vocab_size: int, block_size: int) -> nn.Module:
    """A class of somebody's own, over one of ours."""

    class Mine(GPT):
        pass

    return Mine(GPTConfig(vocab_size=vocab_size, block_size=block_size, n_layer=1, n_head=1, n_embd=8))


def no_rows(micro_size: int) -> Source:
    return source_of((torch.zeros(0, 10),), (torch.zeros(0, 10),), micro_size)


def uneven(micro_size: int) -> Source:
    return source_of((torch.zeros(3, 10), torch.zeros(2)), (torch.zeros(0, 10), torch.zeros(0)), micro_size)


class QuittingLength(Rows):
    def __len__(self) -> int:
        raise SystemExit(0)


def quits_when_asked_for_its_length(micro_size: int) -> Source:
    return replace(rows(micro_size, count=10), train=QuittingLength(torch.zeros(10, 10)))


def cannot_be_had(micro_size: int, url: str) -> Source:
    raise OSError(f"no answer from {url}")


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
    code = (f"model._target_=own_kit.{model}", "data._target_=examples.classifier.rows", "data.count=300")
    return OwnRun(str(folder), Path(), Path(), overrides, {"PYTHONPATH": "tests/kits:."}, code)


def rows_from_anywhere(micro_size: int, **_: object) -> Source:
    """Takes any arguments: addresses, tokens and the like."""
    return rows(n_in=10, count=64, micro_size=micro_size)


class Hanging(Rows):
    """Rows with which rank 1 (or a process without a rank) hangs at its `after`-th microbatch. how: see HANGS."""

    def __init__(self, tensors: Sequence[Tensor], how: str, after: int) -> None:
        super().__init__(*tensors)
        self.how, self.left = how, after

    def __getitem__(self, ids: Sequence[int]) -> Sequence[Tensor]:  # type: ignore[override]
        self.left -= 1
        if self.left == 0 and os.environ.get("RANK", "1") == "1":
            HANGS[self.how]()
        return super().__getitem__(ids)


def leave_out_a_collective() -> None:
    before = stats.all_gather

    def none(received: Tensor, sent: Tensor, async_op: bool) -> Any:
        stats.all_gather = before
        received.copy_(sent.repeat(len(received) // len(sent)))
        return SimpleNamespace(wait=lambda: None)

    stats.all_gather = none


HANGS: dict[str, Callable[[], object]] = {
    "sleeps": lambda: time.sleep(1000),
    "holds the lock": lambda: ctypes.PyDLL(None).sleep(1000),  # PyDLL does not release the interpreter lock
    "leaves out": leave_out_a_collective,
    "raises": lambda: 1 / 0,
    "goes on": lambda: None,
}


def hangs(micro_size: int, how: str, after: int = 40) -> Source:
    source = rows(micro_size, count=300)
    assert isinstance(source.train, Rows)
    return replace(source, train=Hanging(source.train.tensors, how, after))


def ends_slowly(micro_size: int, fails: bool = False) -> Source:
    """Data of a run that has an observer which takes its time at the end. fails: the run ends with an error."""
    before = MetricsLog.on

    def on(log: MetricsLog, event: Event) -> None:
        before(log, event)
        if isinstance(event, AttemptEnded | AttemptFailed):
            time.sleep(9)

    MetricsLog.on = on  # type: ignore[assignment, method-assign]
    return hangs(micro_size, "raises" if fails else "goes on")


class Slow(Linear):
    """In rank 1 the first step and each microbatch of an evaluation take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if os.environ.get("RANK") == "1":
            time.sleep(9 if self.calls == 3 else 0 if self.training else 1.2)  # two calls try the model out
        return super().forward(x, y)


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
