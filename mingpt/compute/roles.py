"""What a parameter is for: optimizers treat embeddings, the output layer, vectors and other matrices differently."""

from typing import Literal

from torch import nn

Role = Literal["embedding", "head", "vector", "matrix"]
HEADS = ("lm_head", "head")  # an output layer is known by its name


def roles(model: nn.Module) -> dict[str, Role]:
    """By parameter name. embedding: an nn.Embedding's, also if the output layer shares it. head: the output layer's.

    vector: biases and norms, and what has more than two dimensions. matrix: the rest.
    """
    out: dict[str, Role] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if isinstance(module, nn.Embedding):
                out[name] = "embedding"
            elif parameter.dim() != 2:
                out.setdefault(name, "vector")
            else:
                out.setdefault(name, "head" if prefix.rpartition(".")[2] in HEADS else "matrix")
    return out
