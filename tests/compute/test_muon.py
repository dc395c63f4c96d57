"""Muon: torch's own update, a step that can be skipped, and which parameter goes to which optimizer."""

import pytest
import torch
from torch import nn

from mingpt.compute.groups import make_optimizers, muon_names, roles
from mingpt.compute.muon import Muon, orthogonal
from mingpt.compute.optimizer import Update, state_layout
from mingpt.config.schema import Health, Optimizer, Schedule
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.kinds.modern import ModernModel
from mingpt.model.modern import Modern

SHAPES = ((8, 8), (8, 24), (24, 8), (1, 5), (7, 3))
SETTINGS = Optimizer(name="muon", lr=0.02, embedding_ratio=16, head_ratio=2, vector_ratio=4)
NO_SKIP, SKIP = torch.zeros(()), torch.ones(())


def gradient(shape: tuple[int, int], step: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("shape", SHAPES)
def test_two_steps_are_those_of_torch(shape: tuple[int, int]) -> None:
    """torch multiplies in bfloat16, whose rounding is within 2% of the update."""
    ours, theirs = (nn.Parameter(gradient(shape, 9)) for _ in range(2))
    before = ours.detach().clone()
    our = Muon([ours], lr=0.02, momentum=0.9, weight_decay=0.1)
    their = torch.optim.Muon([theirs], lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    our.found_inf = NO_SKIP
    for step in range(2):
        ours.grad, theirs.grad = gradient(shape, step), gradient(shape, step)
        our.step()
        their.step()
    assert torch.equal(our.state[ours]["momentum_buffer"], their.state[theirs]["momentum_buffer"])
    assert (ours - theirs).norm() < 0.02 * (theirs - before).norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_singular_values_become_about_one(shape: tuple[int, int]) -> None:
    made = torch.linalg.svdvals(orthogonal(gradient(shape, 1)))
    assert 0.6 < made.min() <= made.max() < 1.3
    assert torch.equal(orthogonal(torch.zeros(shape)), torch.zeros(shape))


def test_a_skipped_step_changes_no_bit_whatever_the_gradient() -> None:
    p = nn.Parameter(gradient((4, 6), 1))
    optimizer = Muon([p], lr=0.02, momentum=0.9, weight_decay=0.1)
    optimizer.found_inf, p.grad = NO_SKIP, gradient((4, 6), 2)
    optimizer.step()
    before, mean = p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()
    optimizer.found_inf, p.grad = SKIP, torch.full((4, 6), torch.nan)
    optimizer.step()
    assert torch.equal(p, before)
    assert torch.equal(optimizer.state[p]["momentum_buffer"], mean)


def test_a_matrix_is_updated_by_itself() -> None:
    """So that later each may have one owner: what else there is changes no bit."""
    together = [nn.Parameter(gradient(shape, i)) for i, shape in enumerate(SHAPES)]
    alone = nn.Parameter(gradient(SHAPES[2], 2))
    for parameters in (together, [alone]):
        optimizer = Muon(parameters, lr=0.02, momentum=0.9, weight_decay=0.1)
        optimizer.found_inf = NO_SKIP
        for p in parameters:
            p.grad = gradient((p.shape[0], p.shape[1]), 5)
        optimizer.step()
    assert torch.equal(together[2], alone)


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


def test_a_role_is_that_of_the_parameter_and_not_of_where_it_stands_first() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = nn.Linear(4, 7, bias=False)
            self.wte = nn.Embedding(7, 4)
            self.lm_head.weight = self.wte.weight
            self.head = nn.Linear(4, 3)

    assert roles(Own()) == {"lm_head.weight": "embedding", "head.weight": "head", "head.bias": "vector"}


def test_each_group_has_its_own_learning_rate_and_only_matrices_decay() -> None:
    model = modern()
    adam, muon = make_optimizers(model.named_parameters(), SETTINGS, roles(model))
    names = {p: name for name, p in model.named_parameters()}
    groups = {
        (type(o).__name__, g["lr"], g["weight_decay"]): {names[p] for p in g["params"]}
        for o in (adam, muon)
        for g in o.param_groups
    }
    of_muon = muon_names("muon", roles(model))
    assert groups == {
        ("Muon", 0.02, 0.1): of_muon,
        ("AdamW", 0.32, 0.0): {"model.embed_tokens.weight"},
        ("AdamW", 0.04, 0.0): {"lm_head.weight"},
        ("AdamW", 0.08, 0.0): {n for n in names.values() if "norm" in n},
    }


def test_all_it_remembers_is_state() -> None:
    """A run that is stopped after two steps and goes on in a new process has the bits of one that was not."""

    def update_of(model: Modern) -> Update:
        return Update(
            model.named_parameters(),
            SETTINGS,
            Schedule(kind="wsd", warmup_steps=1, decay_steps=5),
            roles=roles(model),
            global_size=2,
            tokens_per_microbatch=8,
            fp16=False,
            device=torch.device("cpu"),
            health=Health(),
        )

    def train(model: Modern, update: Update, steps: range) -> None:
        for step in steps:
            update.zero_grad()
            tokens = torch.randint(5, (2, 4), generator=torch.Generator().manual_seed(step))
            loss, count = model(tokens, tokens.roll(-1, 1))
            update.scaled(loss).backward()
            update(step, loss.detach().view(1).double(), count)

    torch.manual_seed(1)
    through, stopped, resumed = modern(), modern(), modern()
    stopped.load_state_dict(through.state_dict())
    first, second, third = update_of(through), update_of(stopped), update_of(resumed)
    train(through, first, range(4))
    train(stopped, second, range(2))
    resumed.load_state_dict(stopped.state_dict())
    third.load({name: tensor.clone() for name, tensor in second.state().items()})
    train(resumed, third, range(2, 4))
    for ours, theirs in ((through.state_dict(), resumed.state_dict()), (first.state(), third.state())):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    layout = state_layout(through.named_parameters(), False, muon_names("muon", roles(through)))
    assert layout == {name: (t.shape, t.dtype) for name, t in first.state().items()}
