"""The modern model: its sizes, its parts, and that generation with caches is the same as without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from mingpt.model.kinds.modern import ModernModel
from mingpt.model.language import KVCache, attention, positions
from mingpt.model.modern import Modern, ModernConfig, rotate, rotation
from mingpt.model.sampling import generate

OPTIONS = Path(__file__).parents[2] / "configs/model"


def shape(**changes: Any) -> ModernConfig:
    sizes = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "head_dim": 6, "n_embd": 16, "block_size": 12} | changes
    return ModernModel.model_validate(sizes).shape(17)


def vivid(**changes: Any) -> Modern:
    """All weights random: at their start the layers do nothing, and the output is 0."""
    torch.manual_seed(3)
    model = Modern(shape(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def random_tokens(*size: int) -> Tensor:
    return torch.randint(17, size, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("option", "vocabulary", "published"),
    [  # the vocabulary and the number of parameters of the published weights
        ("modern-135m", 49152, 134_515_008),
        ("modern-360m", 49152, 361_821_120),
        ("modern-0.6b", 151936, 596_049_920),
        ("modern-1b", 32000, 1_100_048_384),
    ],
)
def test_a_size_has_the_parameters_of_the_published_shape(option: str, vocabulary: int, published: int) -> None:
    kind = ModernModel.model_validate(OmegaConf.to_container(OmegaConf.load(OPTIONS / f"{option}.yaml")))
    with torch.device("meta"):
        model = kind.build(vocabulary)
    assert sum(p.numel() for p in model.parameters()) == kind.parameters(vocabulary) == published


def test_a_new_model_guesses_uniformly() -> None:
    torch.manual_seed(1)
    model = Modern(shape())
    tokens = random_tokens(2, 12)
    loss, count = model(tokens, tokens)
    assert (loss / count).item() == pytest.approx(torch.tensor(17.0).log().item(), abs=1e-6)


def test_rotation_turns_pairs_and_depends_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 6, generator=torch.Generator().manual_seed(1)).unbind(0)

    def score(at: int, to: int) -> float:
        turned = [rotate(x, rotation(torch.tensor([p]), 6, 100.0)) for x, p in ((q, at), (k, to))]
        return float((turned[0] * turned[1]).sum())

    assert score(7, 4) == pytest.approx(score(103, 100), abs=1e-4)
    assert score(7, 4) != pytest.approx(score(7, 5), abs=1e-2)
    turned = rotate(q, rotation(torch.tensor([3]), 6, 100.0)).flatten()
    angle = 3 * 100.0 ** (-2 / 6)  # of the second pair: dimensions 1 and 4
    a, b = q.flatten()[1], q.flatten()[4]
    expected = a * torch.tensor(angle).cos() - b * torch.tensor(angle).sin()
    assert turned[1].item() == pytest.approx(expected.item(), abs=1e-6)


def test_heads_share_keys_and_values() -> None:
    g = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(2, 4, 5, 6, generator=g), *torch.randn(2, 2, 2, 5, 6, generator=g).unbind(0)
    repeated = [x.repeat_interleave(2, 1) for x in (k, v)]
    assert torch.allclose(attention(q, k, v, None), attention(q, repeated[0], repeated[1], None), atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"qk_norm": False}, {"vocab_multiple": 8}])
def test_caches_change_nothing(changes: dict[str, Any]) -> None:
    model, tokens = vivid(**changes), random_tokens(2, 12)
    caches = [KVCache(12) for _ in range(2)]
    parts = [model.logits(tokens[:, :5], caches), *(model.logits(tokens[:, i : i + 1], caches) for i in range(5, 12))]
    assert torch.allclose(torch.cat(parts, 1), model.logits(tokens), atol=1e-5)
    assert generate(model, tokens[:, :3], 20, seed=4).shape == (2, 23)


def test_documents_see_nothing_of_each_other() -> None:
    """Two documents in one sequence have the logits that each has alone."""
    model, tokens = vivid(), random_tokens(1, 12)
    documents = torch.tensor([[3] * 5 + [4] * 7])
    assert positions(tokens, None, documents).tolist() == [[*range(5), *range(7)]]
    together = model.padded_logits(model.activations(tokens, None, documents))
    alone = torch.cat([model.logits(tokens[:, :5]), model.logits(tokens[:, 5:])], 1)
    assert torch.allclose(together, alone, atol=1e-5)
    assert not torch.allclose(together[:, 5:], model.logits(tokens)[:, 5:], atol=1e-2)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"n_head": 3, "head_dim": None}, "model.n_head=3 does not divide model.n_embd=16: set model.head_dim"),
        ({"head_dim": 5}, "model.head_dim=5 is odd, and rotary positions turn pairs of dimensions: choose an even one"),
        ({"n_kv_head": 3}, "model.n_kv_head=3 does not divide model.n_head=4: choose a divisor"),
    ],
)
def test_shapes_that_cannot_be(changes: dict[str, Any], problem: str) -> None:
    sizes = {"n_head": 4, "n_kv_head": 2, "head_dim": 6, "n_embd": 16} | changes
    assert ModernModel.model_validate(sizes).impossible_shape() == problem
