"""Parameter groups: what each parameter is for, and so which optimizer updates it, and how."""

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import nn

from mingpt.compute.muon import Muon
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


def make_optimizers(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: Optimizer, roles: Mapping[str, Role]
) -> list[torch.optim.Optimizer]:
    """Fused AdamW (Loshchilov and Hutter 2019), and with name=muon, Muon for the matrices. `lr` of a group is its peak.

    With AdamW alone, tensors with 2 dimensions or more decay; with Muon, its matrices do.
    """
    of_muon = muon_names(config.name, roles)
    ratios = {"embedding": config.embedding_ratio, "head": config.head_ratio, "vector": config.vector_ratio}
    groups = dict[tuple[float, float], list[nn.Parameter]]()
    matrices = list[nn.Parameter]()
    for name, p in sorted(named_parameters):
        if name in of_muon:
            matrices.append(p)
            continue
        decay = config.weight_decay if p.dim() >= 2 and config.name == "adamw" else 0.0
        groups.setdefault((config.lr * ratios.get(roles[name], 1.0), decay), []).append(p)
    optimizers: list[torch.optim.Optimizer] = []
    if groups:
        optimizers.append(
            torch.optim.AdamW(
                [{"params": ps, "lr": lr, "weight_decay": decay} for (lr, decay), ps in groups.items()],
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                fused=True,
            )
        )
    if matrices:
        optimizers.append(Muon(matrices, config.lr, config.momentum, config.weight_decay))
    return optimizers
