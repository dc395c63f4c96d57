"""The rule that each parameter follows: Muon or AdamW, its learning rate, and its weight decay."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from mingpt.config.schema import Optimizer

Role = Literal["embedding", "head", "vector", "matrix"]
HEADS = ("lm_head", "head")  # an output layer is known by its name: torch has no class for it


@dataclass(frozen=True)
class Rule:
    """How a parameter is updated."""

    # By Muon; otherwise by AdamW.
    muon: bool
    # At its peak. The schedule's factor is the same for all parameters.
    lr: float
    weight_decay: float


def roles(model: nn.Module) -> dict[str, Role]:
    """Each parameter's role. embedding: an nn.Embedding's, which the output layer may share. head: the output layer's.

    vector: biases and norms, and what has more than two dimensions. matrix: the rest.
    """
    # By identity, not by name: a model's output layer may share the embedding's parameter, which named_parameters()
    # gives once, under whichever name comes first.
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    out: dict[str, Role] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in embeddings:
            out[name] = "embedding"
        elif parameter.dim() != 2:
            # What has more dimensions is AdamW's, too: Muon makes matrices orthogonal.
            out[name] = "vector"
        else:
            out[name] = "head" if name.rpartition(".")[0].rpartition(".")[2] in HEADS else "matrix"
    return out


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are not frozen. Only these are reduced and updated, and have optimizer state."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def muon_names(name: str, roles: Mapping[str, Role]) -> set[str]:
    """The parameters that Muon updates. name: of the optimizer."""
    return {parameter for parameter, role in roles.items() if name == "muon" and role == "matrix"}


def rules(named: Iterable[tuple[str, nn.Parameter]], config: Optimizer, roles: Mapping[str, Role]) -> dict[str, Rule]:
    """Each parameter's rule: AdamW (Loshchilov and Hutter 2019), and with optimizer.name=muon, Muon for the matrices.

    With AdamW alone, tensors with 2 dimensions or more decay; with Muon, its matrices do.
    """
    of_muon = muon_names(config.name, roles)
    # Shares of optimizer.lr. As rates of their own they stayed high when a user lowered that key.
    ratios = {"embedding": config.embedding_ratio, "head": config.head_ratio, "vector": config.vector_ratio}
    out: dict[str, Rule] = {}
    for name, p in named:
        decays = name in of_muon if config.name == "muon" else p.dim() >= 2
        # All matrices of Muon have one rule, since `Update` updates them in one call: a ratio for some of them would
        # need a call for each.
        ratio = 1.0 if name in of_muon else ratios.get(roles[name], 1.0)
        out[name] = Rule(name in of_muon, config.lr * ratio, config.weight_decay if decays else 0.0)
    return out
