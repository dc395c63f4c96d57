"""GPT-2 in Hugging Face's form: what its config.json says, and the names of its tensors."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mingpt.model.gpt2 import GPT
from mingpt.weights.form import Sizes, other_values

# What a config.json leaves out has these values: the defaults of transformers' GPT2Config.
DEFAULTS = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}
# The values of the published GPT-2. transformers also knows variants, which our model does not compute.
PUBLISHED: dict[str, tuple[object, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
MASK = re.compile(r"\.attn\.(masked_)?bias$")


class GPT2Form:
    model = GPT
    name = "GPT-2"
    model_type = "gpt2"
    embedding, head = "transformer.wte.weight", "lm_head.weight"
    tied = True
    convert = "GPT2LMHeadModel"

    def __init__(self, model: GPT) -> None:
        self.config = model.config

    def sizes(self, config: Mapping[str, Any]) -> Sizes:
        return {ours: (name, config.get(name, DEFAULTS[name])) for ours, name in NAMES.items()}

    def problems(self, config: Mapping[str, Any]) -> list[str]:
        problems = other_values(config, PUBLISHED, self.name)
        if (inner := config.get("n_inner")) not in (None, 4 * config.get("n_embd", DEFAULTS["n_embd"])):
            problems.append(f"weights of another architecture: config.json says n_inner={inner!r}, not 4 x n_embd")
        return problems

    def renamed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add `transformer.`, which the published checkpoints leave out; drop older ones' attention masks."""
        weights = {name: tensor for name, tensor in tensors.items() if not MASK.search(name)}
        return {n if n.startswith(("transformer.", self.head)) else f"transformer.{n}": t for n, t in weights.items()}

    def config_json(self) -> dict[str, Any]:
        c = self.config
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": self.model_type,
            "vocab_size": c.vocab_size,
            "n_positions": c.block_size,
            "n_ctx": c.block_size,
            "n_embd": c.n_embd,
            "n_layer": c.n_layer,
            "n_head": c.n_head,
            "n_inner": None,
            # The same function as gelu_new. Under this name transformers uses torch's kernel, as we do, so that the
            # logits are bit-equal.
            "activation_function": "gelu_pytorch_tanh",
            "resid_pdrop": c.dropout,
            "embd_pdrop": c.dropout,
            "attn_pdrop": c.dropout,
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
        }


NAMES = {name: name for name in ("n_layer", "n_head", "n_embd", "vocab_size")} | {"block_size": "n_positions"}
