"""The modern model: its sizes, its parts, and that generation with caches is the same as without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from mingpt.model.language import KVCache, positions
from mingpt.model.modern import Modern, ModernConfig, ModernModel

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


@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"qk_norm": False}, {"vocab_multiple": 8}])
def test_caches_change_nothing(changes: dict[str, Any]) -> None:
    model, tokens = vivid(**changes), random_tokens(2, 12)
    caches = [KVCache(12) for _ in range(2)]
    kept = torch.cat([model.logits(part, caches) for part in (tokens[:, :5], *tokens[:, 5:].split(1, 1))], 1)
    assert torch.allclose(kept, model.logits(tokens), atol=1e-5)


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
    ("changes", "key"),
    [
        ({"n_head": 3, "head_dim": None}, "model.n_head=3"),
        ({"head_dim": 5}, "model.head_dim=5"),
        ({"n_kv_head": 3}, "model.n_kv_head=3"),
    ],
)
def test_shapes_that_cannot_be(changes: dict[str, Any], key: str) -> None:
    sizes = {"n_head": 4, "n_kv_head": 2, "head_dim": 6, "n_embd": 16} | changes
    assert str(ModernModel.model_validate(sizes).impossible_shape()).startswith(f"{key} ")
