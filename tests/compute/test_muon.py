"""Muon: torch's own update, a step that can be skipped, and which parameter goes to which optimizer."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from mingpt.compute.buckets import BUCKET_BYTES
from mingpt.compute.groups import Rule, muon_names, roles, rules
from mingpt.compute.muon import cost, orthogonal, owners
from mingpt.compute.optimizer import Update
from mingpt.config.schema import Optimizer, Schedule
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.modern import Modern, ModernModel
from update_kit import state_of, sums_of, update_of

SHAPES = ((8, 8), (8, 24), (24, 8), (1, 5), (7, 3))
SETTINGS = Optimizer(name="muon", lr=0.02, embedding_ratio=16, head_ratio=2, vector_ratio=4)


def gradient(shape: tuple[int, int], step: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


class Matrices(nn.Module):
    """matrix i: with the values of gradient(shape, i)."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.all = nn.ParameterList([gradient(shape, i) for i, shape in enumerate(shapes)])


def muon_of(shapes: Sequence[tuple[int, int]], bucket_bytes: int = BUCKET_BYTES) -> Update:
    config = Optimizer(name="muon", lr=0.02, momentum=0.9, weight_decay=0.1, clip_norm=0)
    return update_of(Matrices(shapes), config, Schedule(kind="constant", warmup_steps=0), bucket_bytes=bucket_bytes)


def step_with(update: Update, gradients: Sequence[torch.Tensor]) -> None:
    for (_, p), g in zip(update.named, gradients, strict=True):
        p.grad = g.clone()
    update(0, torch.zeros(1), torch.tensor(1.0), sums_of(update))


@pytest.mark.parametrize("shape", SHAPES)
def test_two_steps_are_those_of_torch(shape: tuple[int, int]) -> None:
    """torch multiplies in bfloat16, whose rounding is within 2% of the update."""
    update, theirs = muon_of([shape]), nn.Parameter(gradient(shape, 0))
    before = theirs.detach().clone()
    their = torch.optim.Muon([theirs], lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(2):
        theirs.grad = gradient(shape, step)
        step_with(update, [gradient(shape, step)])
        their.step()
    (mean,) = state_of(update).values()
    assert torch.equal(mean, their.state[theirs]["momentum_buffer"])
    assert (update.named[0][1] - theirs).norm() < 0.02 * (theirs - before).norm()
    assert torch.equal(orthogonal(torch.zeros(shape)), torch.zeros(shape))


def test_a_skipped_step_changes_no_bit_whatever_the_gradient() -> None:
    update = muon_of([(4, 6)])
    step_with(update, [gradient((4, 6), 2)])
    before, mean = update.named[0][1].detach().clone(), update.first[0].clone()
    step_with(update, [torch.full((4, 6), torch.nan)])
    assert torch.equal(update.named[0][1], before)
    assert torch.equal(update.first[0], mean)


def test_a_matrix_is_updated_by_itself() -> None:
    """Each has one owner: what else there is, and where it lies, changes no bit."""
    together, apart, alone = muon_of(SHAPES), muon_of(SHAPES, bucket_bytes=1), muon_of([(8, 8), (8, 24), SHAPES[2]])
    assert (len(together.buckets), len(apart.buckets)) == (1, 5)
    for update in (together, apart, alone):
        step_with(update, [gradient((p.shape[0], p.shape[1]), 5) for _, p in update.named])
    third = dict(together.named)["all.2"]
    assert torch.equal(third, dict(apart.named)["all.2"])
    assert torch.equal(third, dict(alone.named)["all.2"])


def test_the_matrices_are_dealt_out_by_their_cost() -> None:
    assert owners([cost(torch.Size(shape)) for shape in SHAPES], 1) == [0] * 5
    assert [cost(torch.Size(shape)) for shape in SHAPES] == [512, 1536, 1536, 5, 63]
    assert owners([512, 1536, 1536, 5, 63], 2) == [0, 0, 1, 1, 1]
    assert owners([3, 3, 3], 5) == [0, 1, 2]


def modern(tied: bool = False) -> Modern:
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 4, "tied": tied}
    return Modern(ModernModel.model_validate(sizes).shape(5))


def test_roles() -> None:
    found = roles(modern())
    assert {n for n, role in found.items() if role == "embedding"} == {"model.embed_tokens.weight"}
    assert {n for n, role in found.items() if role == "head"} == {"lm_head.weight"}
    assert {n.rpartition("layers.0.")[2] for n, role in found.items() if role == "matrix"} == {
        *(f"self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
    }
    assert "head" not in roles(modern(tied=True)).values()
    gpt2 = roles(GPT(GPTConfig(5, 4, 1, 2, 8)))
    assert {n for n, role in gpt2.items() if role == "embedding"} == {
        "transformer.wte.weight",
        "transformer.wpe.weight",
    }
    assert sum(role == "matrix" for role in gpt2.values()) == 4


def test_each_group_has_its_own_learning_rate_and_only_matrices_decay() -> None:
    model = modern()
    found = rules(model.named_parameters(), SETTINGS, roles(model))
    groups = {rule: {name for name, its in found.items() if its == rule} for rule in found.values()}
    assert groups == {
        Rule(True, 0.02, 0.1): muon_names("muon", roles(model)),
        Rule(False, 0.32, 0.0): {"model.embed_tokens.weight"},
        Rule(False, 0.04, 0.0): {"lm_head.weight"},
        Rule(False, 0.08, 0.0): {n for n in found if "norm" in n},
    }
