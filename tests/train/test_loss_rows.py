"""train.loss_rows: the loss in pieces, so that not all logits are in memory at a time."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from config_kit import configured
from mingpt.config.schema import WorldConfig
from mingpt.errors import UserError
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.language import IGNORE, LanguageModel
from mingpt.model.modern import Modern, ModernConfig
from mingpt.model.pieces import loss_in_pieces
from mingpt.train.bench import Bench
from mingpt.train.factory import prepare
from mingpt.world.joining import join
from run_kit import TINY

BATCH, TIME = 3, 8
SHAPE: dict[str, Any] = {
    "vocab_size": 37,
    "block_size": TIME,
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 16,
    "vocab_multiple": 8,
}
MODERN: dict[str, Any] = {
    "n_kv_head": 1,
    "head_dim": 8,
    "n_inner": 24,
    "rope_base": 1e4,
    "norm_eps": 1e-6,
    "qk_norm": True,
}


def models() -> dict[str, LanguageModel]:
    torch.manual_seed(0)
    made: dict[str, LanguageModel] = {
        "gpt2, tied": GPT(GPTConfig(**SHAPE)),
        "modern": Modern(ModernConfig(**SHAPE, **MODERN, tied=False)),
        "modern, tied": Modern(ModernConfig(**SHAPE, **MODERN, tied=True)),
    }
    for model in made.values():
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.2)
    return made


def inputs(weighted: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(37, (2, BATCH, TIME), generator=generator)
    targets[0, 2:5] = IGNORE
    targets[2] = IGNORE  # a whole piece, where pieces have eight rows
    return (tokens, targets, torch.rand(BATCH, TIME, generator=generator)) if weighted else (tokens, targets)


def gradients(model: LanguageModel, forward: Callable[..., tuple[Tensor, Tensor]], *batch: Tensor) -> list[Tensor]:
    """Loss, count, and every parameter's gradient, each of which must come once."""
    seen = list[Tensor]()
    hooks = [p.register_post_accumulate_grad_hook(seen.append) for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    loss, count = forward(*batch)
    loss.backward()
    for hook in hooks:
        hook.remove()
    assert len({id(p) for p in seen}) == len(seen) == len(hooks)
    return [loss.detach(), count, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("name", "weighted", "frozen"),
    [
        ("gpt2, tied", False, False),
        ("modern", True, False),
        ("modern", False, True),
        ("modern, tied", True, False),
    ],
)
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_loss_and_gradients_are_those_of_the_whole(name: str, weighted: bool, frozen: bool, rows: int) -> None:
    """Up to rounding: float64 leaves 1e-12 of it. frozen: the output layer, which then gets no gradient."""
    model = models()[name].double()
    model.output_weight().requires_grad_(not frozen)
    with patch.object(LanguageModel, "padded_logits", lambda self, x: x @ self.output_weight().t()):  # without .float()
        whole = gradients(model, model, *inputs(weighted))
        pieces = gradients(model, partial(loss_in_pieces, model, rows), *inputs(weighted))
    for a, b in zip(whole, pieces, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6 if a.dtype == torch.float32 else 1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt2, tied", "modern"])
def test_the_output_layer_is_as_good_in_half_precision(name: str) -> None:
    """Its gradient is added up in float32. In bfloat16 its error would be twice as large."""
    model, batch = models()[name], inputs(False)
    gradients(model, model, *batch)
    exact = model.output_weight().grad
    assert exact is not None
    errors = []
    for forward in (model, partial(loss_in_pieces, model, 1)):
        with torch.autocast("cpu", torch.bfloat16):
            loss, *_ = gradients(model, forward, *batch)
        found = model.output_weight().grad
        assert found is not None
        assert loss.dtype == found.dtype == torch.float32
        errors.append(float((found - exact).norm() / exact.norm()))
    assert errors[1] <= 1.1 * errors[0] < 0.01


@pytest.mark.parametrize("training", [True, False])
def test_logits_are_made_piece_by_piece_and_none_is_kept(training: bool) -> None:
    model, kept, made = models()["gpt2, tied"], list[int](), list[int]()
    compute = model.padded_logits

    def counted(activations: Tensor) -> Tensor:
        made.append(activations.shape[:-1].numel())
        return compute(activations)

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape[-1] if tensor.dim() else 0)
        return tensor

    with patch.object(model, "padded_logits", counted), torch.set_grad_enabled(training):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, _ = loss_in_pieces(model, 10, *inputs(False))
        assert made == [10, 10, 4]
        assert 40 not in kept  # the padded vocabulary
        if training:
            loss.backward()
            assert sorted(made) == [4, 4, 10, 10, 10, 10]


@pytest.mark.parametrize("more", ["train.recompute=block", "precision=bf16", "train.freeze=['*wpe*']"])
def test_steps_with_it_learn_as_without(more: str, text: Path, cache: Path) -> None:
    """In `Bench`, with the reduction's hooks, which refuse a gradient that comes in parts."""
    found = {}
    places = (f"data.path={text}", f"data.cache_dir={cache}")
    with join(WorldConfig(device="cpu")) as world:
        for rows in (0, 5):
            config = configured(*TINY, *places, more, f"train.loss_rows={rows}")
            bench = Bench(config, config.data.open(config.model.block_size, config.batch.micro_size), world, 1)
            found[rows] = [bench.step(step).loss for step in range(4)]
    assert found[0] != found[5]
    assert found[5] == pytest.approx(found[0], rel=1e-2 if more == "precision=bf16" else 1e-5)


def test_evaluation_takes_pieces_too() -> None:
    model = models()["modern"].eval()
    whole = model(*inputs(True))
    prepare(configured(*TINY, "train.loss_rows=5"), model)
    with patch.object(model, "loss_and_logits", side_effect=AssertionError("all logits at once")), torch.no_grad():
        torch.testing.assert_close(model(*inputs(True)), whole)


def test_loss_rows_are_for_language_models() -> None:
    with pytest.raises(UserError, match=r"train\.loss_rows=5"):
        configured("model._target_=own_kit.Linear", "data._target_=examples.classifier.rows", "train.loss_rows=5")
