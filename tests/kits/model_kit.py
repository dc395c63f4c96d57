"""Small language models whose weights are large: at GPT-2's 0.02 most paths hardly show in the logits."""

from typing import TypeVar

import torch
from torch import Tensor, nn

from mingpt.config.models import GPTModel, ModernModel
from mingpt.model.building import build_language_model
from mingpt.model.language import LanguageModel

KINDS = {"gpt": GPTModel(), "modern": ModernModel(n_kv_head=1)}
WORDS, BLOCK, PADDED = 17, 8, 64
SIZES = {"block_size": BLOCK, "n_layer": 2, "n_head": 2, "n_embd": 20, "vocab_multiple": PADDED}
Model = TypeVar("Model", bound=nn.Module)


def vivid(model: Model) -> Model:
    """All weights random, biases too."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def small(kind: str, words: int = WORDS, **changes: float) -> LanguageModel:
    """A small model of a kind of KINDS. changes: to its settings."""
    torch.manual_seed(1)
    return vivid(build_language_model(KINDS[kind].model_copy(update=SIZES | changes), words))


def random_tokens(batch: int, time: int, words: int = WORDS) -> Tensor:
    """The same tokens [batch, time] each time."""
    return torch.randint(words, (batch, time), generator=torch.Generator().manual_seed(1))
