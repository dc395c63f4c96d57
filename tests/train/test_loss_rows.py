"""train.loss_rows: the loss in pieces, so that not all logits are in memory at a time."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from mingpt.model.language import IGNORE, LanguageModel
from mingpt.train.preparing import prepare
from tests.kits.config_kit import configured
from tests.kits.model_kit import BLOCK, KINDS, PADDED, WORDS, small
from tests.kits.run_kit import TINY

BATCH = 3


def inputs(weighted: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(WORDS, (2, BATCH, BLOCK), generator=generator)
    targets[0, 2:5] = IGNORE
    targets[2] = IGNORE  # a whole piece, where pieces have eight rows
    return (tokens, targets, torch.rand(BATCH, BLOCK, generator=generator)) if weighted else (tokens, targets)


def in_pieces(model: LanguageModel, rows: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def forward(tokens: Tensor, targets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return model.loss_in_pieces(rows, model.activations(tokens), targets, weights)

    return forward


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
    ("kind", "tied", "weighted", "frozen"),
    [
        ("gpt", {}, False, False),
        ("modern", {}, True, False),
        ("modern", {}, False, True),
        ("modern", {"tied": True}, True, False),
    ],
)
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_loss_and_gradients_are_those_of_the_whole(
    kind: str, tied: dict[str, Any], weighted: bool, frozen: bool, rows: int
) -> None:
    """Up to rounding: float64 leaves 1e-12 of it. frozen: the output layer, which then gets no gradient."""
    model = small(kind, **tied).double()
    model.output_weight().requires_grad_(not frozen)
    with patch.object(LanguageModel, "padded_logits", lambda self, x: x @ self.output_weight().t()):  # without .float()
        whole = gradients(model, model, *inputs(weighted))
        pieces = gradients(model, in_pieces(model, rows), *inputs(weighted))
    for a, b in zip(whole, pieces, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6 if a.dtype == torch.float32 else 1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_layer_is_as_good_in_half_precision(kind: str) -> None:
    """Its gradient is added up in float32. In bfloat16 its error would be twice as large."""
    model, batch = small(kind), inputs(False)
    gradients(model, model, *batch)
    exact = model.output_weight().grad
    assert exact is not None
    errors = []
    for forward in (model, in_pieces(model, 1)):
        with torch.autocast("cpu", torch.bfloat16):
            loss, *_ = gradients(model, forward, *batch)
        found = model.output_weight().grad
        assert found is not None
        assert loss.dtype == found.dtype == torch.float32
        errors.append(float((found - exact).norm() / exact.norm()))
    assert errors[1] <= 1.1 * errors[0] < 0.02


@pytest.mark.parametrize("training", [True, False])
def test_logits_are_made_piece_by_piece_and_none_is_kept(training: bool) -> None:
    model, kept, made = small("gpt"), list[int](), list[int]()
    compute = model.padded_logits

    def counted(activations: Tensor) -> Tensor:
        made.append(activations.shape[:-1].numel())
        return compute(activations)

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape[-1] if tensor.dim() else 0)
        return tensor

    with patch.object(model, "padded_logits", counted), torch.set_grad_enabled(training):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, _ = in_pieces(model, 10)(*inputs(False))
        assert made == [10, 10, 4]
        assert PADDED not in kept  # the padded vocabulary
        if training:
            loss.backward()
            assert sorted(made) == [4, 4, 10, 10, 10, 10]


def test_evaluation_takes_pieces_too() -> None:
    model = small("modern").eval()
    whole = model(*inputs(True))
    prepare(configured(*TINY, "train.loss_rows=5"), model)
    with patch.object(model, "loss_and_logits", side_effect=AssertionError("all logits at once")), torch.no_grad():
        torch.testing.assert_close(model(*inputs(True)), whole)
