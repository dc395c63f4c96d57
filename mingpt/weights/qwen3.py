"""Our modern model in Hugging Face's form: Qwen3's; Llama's if it does not normalise queries and keys, or Qwen2's."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mingpt.model.modern import HIGH, LOW, Modern

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
# What transformers takes for the heads of keys and values, and their width, where config.json leaves them out. None: of
# the heads and the model's width.
DEFAULTS = {"qwen3": (32, 128), "qwen2": (32, None), "llama": (None, None)}


class Qwen3Form:
    """See GPT2Form."""

    model = Modern
    published: Mapping[str, tuple[object, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
    }
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"

    def __init__(self, model: Modern) -> None:
        self.config = model.config
        self.tied = self.config.tied
        # Three architectures that differ in these two settings alone, so one class has all of them.
        self.name = "Qwen3" if self.config.qk_norm else "Qwen2" if self.config.qkv_bias else "Llama"
        self.model_type = self.name.lower()
        self.convert = f"{self.name}ForCausalLM"

    def sizes(self, config: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
        heads, width = config.get("num_attention_heads"), config.get("hidden_size")
        size = width // heads if type(heads) is type(width) is int and heads else None
        of_keys, of_each = DEFAULTS[self.model_type]
        defaults = {"num_key_value_heads": of_keys or heads, "head_dim": of_each or size}
        return {ours: (name, config.get(name) or defaults.get(name)) for ours, name in NAMES.items()}

    def problems(self, config: Mapping[str, Any]) -> list[str]:
        problems = list[str]()
        rope = config.get("rope_parameters") or config.get("rope_scaling")  # transformers 5, and before
        rope = rope if isinstance(rope, dict) else {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        ends = rope.get("low_freq_factor"), rope.get("high_freq_factor")
        if kind not in ("default", "llama3") or (kind == "llama3" and ends != (LOW, HIGH)):
            problems.append(
                f"weights of another architecture: config.json says rope_type={kind!r}: 'default' is known, and "
                f"'llama3' with low_freq_factor={LOW:g} and high_freq_factor={HIGH:g}"
            )
        scaled = rope if kind == "llama3" else {}
        if (factor := scaled.get("factor", 1.0)) != self.config.rope_factor:
            problems.append(f"the weights have rope factor={factor!r}: set model.rope_factor={factor!r}")
        name = "original_max_position_embeddings"
        if (original := scaled.get(name, self.config.rope_original)) != self.config.rope_original:
            problems.append(f"the weights have {name}={original!r}: set model.rope_original={original!r}")
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
        rope: dict[str, Any] = {"rope_type": "default"}
        if c.rope_factor != 1:
            rope = {"rope_type": "llama3", "factor": c.rope_factor, "low_freq_factor": LOW, "high_freq_factor": HIGH}
            rope["original_max_position_embeddings"] = c.rope_original
        # Each has a key of its own: Qwen's have no bias in the MLP, and Qwen2's always some in the attention.
        without = {"Qwen3": {"mlp_bias"}, "Qwen2": {"mlp_bias", "attention_bias"}}.get(self.name, set())
        return {
            "architectures": [self.convert],
            "model_type": self.model_type,
            **{name: getattr(c, ours) for ours, name in NAMES.items()},
            **{name: values[0] for name, values in self.published.items() if name not in without},
            "rms_norm_eps": c.norm_eps,
            "rope_theta": c.rope_base,  # where transformers before 5, and other tools, look for it
            "rope_scaling": None if c.rope_factor == 1 else rope,
            "rope_parameters": {"rope_theta": c.rope_base, **rope},
            "tie_word_embeddings": c.tied,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
        }
