"""What is known of one architecture in Hugging Face's form: a class for each (gpt2.py, qwen3.py)."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from mingpt.model.language import LanguageModel, Shape

Sizes = dict[str, tuple[str, Any]]  # by our key in the model section: their key in config.json, and its value


class Form(Protocol):
    """name: of the architecture. convert: transformers' class. embedding, head: names of tensors.

    tied: the model has no head of its own.
    """

    name: str
    model_type: str
    convert: str
    embedding: str
    head: str
    tied: bool

    @property
    def config(self) -> Shape: ...

    def model(self, shape: Any) -> LanguageModel:
        """The model of another shape."""

    def sizes(self, config: Mapping[str, Any]) -> Sizes:
        """What a config.json says of the sizes; nothing is checked."""

    def problems(self, config: Mapping[str, Any]) -> list[str]:
        """What else in a config.json our model does not compute, or computes only with other settings."""

    def renamed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a file under our names."""

    def config_json(self) -> dict[str, Any]:
        """The config.json of our model, without the numbers of special tokens."""


def other_values(config: Mapping[str, Any], published: Mapping[str, tuple[object, ...]], name: str) -> list[str]:
    return [
        f"weights of another architecture: config.json says {key}={config[key]!r}, {name} has {known[0]!r}"
        for key, known in published.items()
        if config.get(key, known[0]) not in known
    ]
