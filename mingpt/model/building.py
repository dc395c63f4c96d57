"""The module that a config's `model` section describes, with its first weights."""

from torch import nn

from mingpt.config import plugin
from mingpt.config.kinds import Model
from mingpt.config.models import GPTModel, Language, ModernModel, OwnModel
from mingpt.errors import UserError
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.language import LanguageModel
from mingpt.model.modern import Modern, ModernConfig


def build_model(config: Model, vocab_size: int) -> nn.Module:
    """vocab_size: 0 if the data has no tokens. Raises UserError if the kind needs some, or the user's code fails."""
    if isinstance(config, Language):
        return build_language_model(config, vocab_size)
    assert isinstance(config, OwnModel)
    made: nn.Module = plugin.call("model", config, vocab_size=vocab_size, block_size=config.block_size)
    return made


def build_language_model(config: Language, vocab_size: int) -> LanguageModel:
    """Raises UserError if there are no tokens."""
    if not vocab_size:
        raise UserError("the data has no tokens, and a GPT needs some: choose other data, or name a model._target_")
    if isinstance(config, ModernModel):
        return Modern(ModernConfig.of(config, vocab_size))
    assert isinstance(config, GPTModel)
    return GPT(GPTConfig.of(config, vocab_size))
