"""A start draws the model's first weights, and a resume draws none: with the same bits in every case."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mingpt.config.keys import KINDS
from mingpt.config.models import Language
from mingpt.data.own import source_of
from mingpt.data.source import Source
from mingpt.errors import FINISHED
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from mingpt.train.attempt import attempt
from mingpt.train.factory import build
from mingpt.world.lifetime import Lifetime
from tests.kits.config_kit import configured
from tests.kits.paths_kit import ran
from tests.kits.run_kit import TINY

STEPS, HALF = 4, 2
SHORT = (
    *TINY, "model.dropout=0", "data=random", "data.vocabulary=65", "batch.global_size=4", "train.eval_every=0",
    "snapshot.every_steps=1",
)  # fmt: skip
MODERN = ("~model.dropout", "model=modern-nano", "model.n_head=2", "model.head_dim=4")


class Drawn(TorchDispatchMode):
    """Counts the random numbers that torch draws, but for whole ones (seeds)."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        random = torch.Tag.nondeterministic_seeded in function.tags
        if random and isinstance(out, Tensor) and out.is_floating_point() and not out.is_meta:
            self.numbers += out.numel()
        return out


@contextmanager
def poisoned() -> Iterator[None]:
    """What nobody has written is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def train(folder: Path, steps: int, *overrides: str) -> int:
    """Train up to a step; returns how many random numbers were drawn meanwhile."""
    without = {o[1:] for o in overrides if o[0] == "~"}
    words = [o for o in (*SHORT, *overrides) if o[0] != "~" and o.partition("=")[0] not in without]
    with poisoned(), Drawn() as drawn:
        assert attempt([*words, f"run.dir={folder}", f"train.max_steps={steps}"], Lifetime()) == FINISHED
    return drawn.numbers


def digest(folder: Path) -> str:
    store = Store(f"{folder}/snapshots")
    assert store.steps()[0] == STEPS
    return read(store, STEPS).manifest.digest


class Remembers(nn.Module):
    """A model of one's own whose first numbers go into what no snapshot has: a plain tensor and a buffer."""

    kept: Tensor
    stored: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.plain = torch.rand(3) + self.layer.weight.detach()[0]
        self.register_buffer("kept", torch.rand(3), persistent=False)
        self.register_buffer("stored", torch.rand(3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        told = self.layer(x + self.plain * self.kept * self.stored).squeeze(1)
        return nn.functional.mse_loss(told, y, reduction="sum"), torch.tensor(len(y))


def rows() -> Source:
    x = torch.arange(192).view(64, 3) / 192
    return source_of((x, x.sum(1)), (x[:0], x[:0, 0]), 2)


OWN = (
    *(f"~model.{key}" for key in ("n_layer", "n_embd", "block_size", "dropout")), "~model", "~data", "~data.vocabulary",
    "model._target_=test_start.Remembers", "data._target_=test_start.rows",
)  # fmt: skip
CASES = {
    "gpt": (),
    "a mean of the weights": ("optimizer.ema=0.9",),
    "frozen": ("train.freeze=[transformer.wte.weight,transformer.h.0.*]",),
    "padded": ("model.vocab_multiple=64",),
    "fp16": ("precision=fp16",),
    "modern": MODERN,
    "tied": (*MODERN, "model.tied=true", "optimizer=muon"),
    "a model of one's own": OWN,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "damaged"),
    [*product(CASES, [0]), *product(["gpt", "modern", "a model of one's own"], [1, 2])],
)
def test_a_resume_draws_nothing_unless_no_snapshot_is_good_and_has_the_same_bits(
    case: str, damaged: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """damaged: so many of two snapshots. It gives way to an older one, or to a new beginning."""
    overrides = CASES[case]
    begun = train(tmp_path / "whole", STEPS, *overrides)
    assert train(tmp_path / "halves", HALF, *overrides) == begun > 0
    for step in (2, 1)[:damaged]:
        for part in (tmp_path / f"halves/snapshots/step-{step:09}").glob("*.safetensors"):
            content = part.read_bytes()
            part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    again = train(tmp_path / "halves", STEPS, *overrides)
    assert capsys.readouterr().out.count("DAMAGED SNAPSHOT") == damaged
    assert again == begun * ((overrides is OWN) + (damaged == 2))  # its __init__ may compute anything
    assert digest(tmp_path / "halves") == digest(tmp_path / "whole")


IMPORTS = """
import sys, torch
import mingpt.train.attempt
from mingpt.compose.compose import configure
from mingpt.train.factory import build
from mingpt.train.preparing import give_memory
for kind in ("gpt", "modern"):
    model = build(configure([f"model.kind={kind}", "data=random", "run.dir=run"], 1), 65, drawn=False)
    give_memory(model, torch.device("cpu"))
print([name for name in ("sympy", "torch._dynamo", "torch._inductor") if name in sys.modules])
"""


@pytest.mark.slow
def test_an_outline_does_not_import_the_compiler() -> None:
    """A second that a start does not need; and torch would choose a folder for compiled code before ours is named."""
    assert ran([sys.executable, "-c", IMPORTS]).stdout == "[]\n"


@pytest.mark.parametrize("kind", [name for name, kind in KINDS["model"].items() if issubclass(kind, Language)])
def test_an_outline_needs_nothing_but_weights(kind: str) -> None:
    """What is no parameter would be lost on the device `meta`; a parameter that two modules share would become two."""
    config = configured(f"model.kind={kind}", "model.n_layer=2", "train.freeze=['*.0.*']")
    drawn, without = build(config, 65), build(config, 65, drawn=False)
    for module in (*drawn.modules(), *without.modules()):
        assert not [*module.buffers(recurse=False)]
        assert not [name for name, value in vars(module).items() if isinstance(value, Tensor)]
    names = [name for name, _ in drawn.named_parameters(remove_duplicate=False)]
    assert names == [*drawn.state_dict()]
    assert [(n, p.shape, p.dtype, p.requires_grad) for n, p in drawn.named_parameters()] == [
        (n, p.shape, p.dtype, p.requires_grad) for n, p in without.named_parameters()
    ]
    assert all(p.is_meta for p in without.parameters())
