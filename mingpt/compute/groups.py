"""Parameter groups: what each parameter is for, and so which optimizer updates it, and how."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from mingpt.config.schema import Optimizer

Role = Literal["embedding", "head", "vector", "matrix"]
HEADS = ("lm_head", "head")  # an output layer is known by its name


def roles(model: nn.Module) -> dict[str, Role]:
    """By parameter name. embedding: an nn.Embedding's, also if the output layer shares it. head: the output layer's.

    vector: biases and norms, and what has more than two dimensions. matrix: the rest.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    out: dict[str, Role] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in embeddings:
            out[name] = "embedding"
        elif parameter.dim() != 2:
            out[name] = "vector"
        else:
            out[name] = "head" if name.rpartition(".")[0].rpartition(".")[2] in HEADS else "matrix"
    return out


def muon_names(name: str, roles: Mapping[str, Role]) -> set[str]:
    """The parameters that Muon updates. name: of the optimizer."""
    return {parameter for parameter, role in roles.items() if name == "muon" and role == "matrix"}


@dataclass(frozen=True)
class Rule:
    """How a parameter is updated: by Muon or AdamW. lr: at its peak."""

    muon: bool
    lr: float
    weight_decay: float


def rules(named: Iterable[tuple[str, nn.Parameter]], config: Optimizer, roles: Mapping[str, Role]) -> dict[str, Rule]:
    """By parameter name. AdamW (Loshchilov and Hutter 2019), and with optimizer.name=muon, Muon for the matrices.

    With AdamW alone, tensors with 2 dimensions or more decay; with Muon, its matrices do.
    """
    of_muon = muon_names(config.name, roles)
    ratios = {"embedding": config.embedding_ratio, "head": config.head_ratio, "vector": config.vector_ratio}
    out: dict[str, Rule] = {}
    for name, p in named:
        decays = name in of_muon if config.name == "muon" else p.dim() >= 2
        ratio = 1.0 if name in of_muon else ratios.get(roles[name], 1.0)
        out[name] = Rule(name in of_muon, config.lr * ratio, config.weight_decay if decays else 0.0)
    return out
