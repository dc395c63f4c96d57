"""Muon: torch's own update, and which parameter goes to which optimizer. (A step that is skipped: test_optim.py.)"""

import pytest
import torch
from torch import nn

from mingpt.compute.muon import orthogonal, owners
from mingpt.compute.rules import Rule, roles, rules
from mingpt.config.models import ModernModel
from mingpt.config.schema import Optimizer, Schedule
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.modern import Modern, ModernConfig
from tests.kits.update_kit import state_of, sums_of, update_of


def gradient(shape: tuple[int, int], step: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (1, 5)])
def test_two_steps_are_those_of_torch(shape: tuple[int, int]) -> None:
    """torch multiplies in bfloat16, whose rounding is within 2% of the update."""
    config = Optimizer(name="muon", lr=0.02, momentum=0.9, weight_decay=0.1, clip_norm=0)
    ours, theirs = nn.Linear(shape[1], shape[0], bias=False), nn.Parameter(gradient(shape, 0))
    ours.weight.data = theirs.detach().clone()
    update = update_of(ours, config, Schedule(kind="constant", warmup_steps=0))
    their = torch.optim.Muon([theirs], lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(2):
        ours.weight.grad, theirs.grad = gradient(shape, step), gradient(shape, step)
        update(0, torch.zeros(1), torch.tensor(1.0), sums_of(update))
        their.step()
    (mean,) = state_of(update).values()
    assert torch.equal(mean, their.state[theirs]["momentum_buffer"])
    assert (ours.weight - theirs).norm() < 0.02 * (theirs - gradient(shape, 0)).norm()
    assert torch.equal(orthogonal(torch.zeros(shape)), torch.zeros(shape))


def test_the_matrices_are_dealt_out_by_their_cost() -> None:
    assert owners([512, 1536, 1536, 5, 63], 2) == [0, 0, 1, 1, 1]


def test_each_kind_of_parameter_has_its_own_learning_rate_and_only_matrices_decay() -> None:
    config = Optimizer(name="muon", lr=0.02, embedding_ratio=16, head_ratio=2, vector_ratio=4)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 4}
    model = Modern(ModernConfig.of(ModernModel.model_validate(sizes), 5))
    found = rules(model.named_parameters(), config, roles(model))
    assert {rule: {name for name, its in found.items() if its == rule} for rule in found.values()} == {
        Rule(True, 0.02, 0.1): {n for n in found if "_proj" in n},
        Rule(False, 0.32, 0.0): {"model.embed_tokens.weight"},
        Rule(False, 0.04, 0.0): {"lm_head.weight"},
        Rule(False, 0.08, 0.0): {n for n in found if "norm" in n},
    }
    gpt2 = roles(GPT(GPTConfig(5, 4, 1, 2, 8)))
    assert [n.split(".")[1] for n, role in gpt2.items() if role == "embedding"] == ["wte", "wpe"]
