"""Our modern model in Hugging Face's form: Qwen3's, or Llama's if it does not normalise queries and keys."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mingpt.model.modern import Modern

NAMES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "head_dim": "head_dim",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
QWEN3 = {"num_key_value_heads": 32, "head_dim": 128}


class Qwen3Form:
    """See GPT2Form."""

    model = Modern
    published: Mapping[str, tuple[object, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
        "rope_scaling": (None,),
    }
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"

    def __init__(self, model: Modern) -> None:
        self.config = model.config
        self.tied = self.config.tied
        self.name, self.model_type = ("Qwen3", "qwen3") if self.config.qk_norm else ("Llama", "llama")
        self.convert = f"{self.name}ForCausalLM"

    def sizes(self, config: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
        heads, width = config.get("num_attention_heads"), config.get("hidden_size")
        size = width // heads if type(heads) is type(width) is int and heads else None
        # What transformers takes for a key that config.json leaves out.
        defaults = {"num_key_value_heads": heads, "head_dim": size} if self.model_type == "llama" else QWEN3
        return {ours: (name, config.get(name) or defaults.get(name)) for ours, name in NAMES.items()}

    def problems(self, config: Mapping[str, Any]) -> list[str]:
        problems = list[str]()
        rope = config.get("rope_parameters")
        rope = rope if isinstance(rope, dict) else {}
        if (kind := rope.get("rope_type", "default")) != "default":
            problems.append(f"weights of another architecture: config.json says rope_type={kind!r}, not 'default'")
        if (base := rope.get("rope_theta", config.get("rope_theta", 10000.0))) != self.config.rope_base:
            problems.append(f"the weights have rope_theta={base!r}: set model.rope_base={base!r}")
        if (eps := config.get("rms_norm_eps", 1e-6)) != self.config.norm_eps:
            problems.append(f"the weights have rms_norm_eps={eps!r}: set model.norm_eps={eps!r}")
        if (tied := config.get("tie_word_embeddings", False)) is not self.tied:
            problems.append(f"the weights have tie_word_embeddings={tied!r}: set model.tied={str(bool(tied)).lower()}")
        return problems

    def renamed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def config_json(self) -> dict[str, Any]:
        c = self.config
        return {
            "architectures": [self.convert],
            "model_type": self.model_type,
            **{name: getattr(c, ours) for ours, name in NAMES.items()},
            **{name: values[0] for name, values in self.published.items() if name != "mlp_bias" or not c.qk_norm},
            "rms_norm_eps": c.norm_eps,
            "rope_theta": c.rope_base,  # where transformers before 5, and other tools, look for it
            "rope_parameters": {"rope_theta": c.rope_base, "rope_type": "default"},
            "tie_word_embeddings": c.tied,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
        }
