"""GPT-2 in Hugging Face's form: what its config.json says, and the names of its tensors."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mingpt.model.gpt2 import GPT

# By our key in the model section: the key in config.json, and its value where that leaves it out.
SIZES: dict[str, tuple[str, Any]] = {
    "n_layer": ("n_layer", 12),
    "n_head": ("n_head", 12),
    "n_embd": ("n_embd", 768),
    "block_size": ("n_positions", 1024),
    "vocab_size": ("vocab_size", 50257),
}
MASK = re.compile(r"\.attn\.(masked_)?bias$")


class GPT2Form:
    """GPT-2's form. What a form has, Qwen3Form has, too."""

    model = GPT
    # Of the architecture: as people write it, as config.json does, and transformers' class.
    name, model_type, convert = "GPT-2", "gpt2", "GPT2LMHeadModel"
    # Names of tensors.
    embedding, head = "transformer.wte.weight", "lm_head.weight"
    # The model has no head of its own.
    tied = True
    # Of the published GPT-2, which a config.json may leave out. transformers also knows variants, which our model does
    # not compute.
    published: Mapping[str, tuple[object, ...]] = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    }

    def __init__(self, model: GPT) -> None:
        self.config = model.config

    def sizes(self, config: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
        """Give, by our key in the model section, their key in a config.json and its value; nothing is checked."""
        return {ours: (theirs, config.get(theirs, default)) for ours, (theirs, default) in SIZES.items()}

    def problems(self, config: Mapping[str, Any]) -> list[str]:
        """Say what else in a config.json our model does not compute, or computes only with other settings."""
        if (inner := config.get("n_inner")) in (None, 4 * config.get("n_embd", SIZES["n_embd"][1])):
            return []
        return [f"weights of another architecture: config.json says n_inner={inner!r}, not 4 x n_embd"]

    def renamed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add `transformer.`, which the published checkpoints leave out; drop older ones' attention masks."""
        renamed = dict[str, Tensor]()
        for name, tensor in tensors.items():
            if not MASK.search(name):
                has_prefix = name.startswith(("transformer.", self.head))
                renamed[name if has_prefix else f"transformer.{name}"] = tensor
        return renamed

    def config_json(self) -> dict[str, Any]:
        """The config.json of our model, without the numbers of special tokens."""
        c = self.config
        return {
            "architectures": [self.convert],
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
