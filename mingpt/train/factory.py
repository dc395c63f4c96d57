"""Builds the model of a config, and gives it the weights that a run begins with."""

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mingpt.cli.console import say
from mingpt.compute.batches import derive
from mingpt.config.schema import Config
from mingpt.config.section import Own
from mingpt.data.source import Source
from mingpt.model.building import build_model
from mingpt.model.language import LanguageModel
from mingpt.train.own_model import check_module
from mingpt.train.preparing import freeze
from mingpt.weights.reading import start_from
from mingpt.world.world import World


def build(config: Config, vocab_size: int, drawn: bool = True) -> nn.Module:
    """The model with its initial weights on the CPU, the same in every process.

    vocab_size: 0 if the data has no tokens. drawn: without, the package's own models are an outline, on the device
    `meta`. Most starts go on from a snapshot, which has all of their state, since they consist of parameters alone.
    `place_model` gives them memory, and `first_weights` what they begin with, if there is no snapshot. A user's own
    is always drawn, since its __init__ may compute anything. Raises UserError if the model can't be built.
    """
    # The bits of an initialisation may depend on it.
    torch.set_num_threads(config.train.threads)
    if drawn or isinstance(config.model, Own):
        torch.manual_seed(derive("weights", config.seed))
        model = build_model(config.model, vocab_size)
    else:
        # Without a seed: torch would seed the GPU, too, and wait for it, which another thread is opening meanwhile.
        with torch.device("meta"), Undrawn():
            model = build_model(config.model, vocab_size)
    if isinstance(config.model, Own):
        check_module(model, config.model)
    freeze(model, config.train.freeze)
    return model


class Undrawn(TorchFunctionMode):
    """torch.nn.init does nothing. On `meta` it has nothing to do, and imports torch's compiler for that: a second."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def first_weights(config: Config, source: Source, model: nn.Module, world: World, redraw: bool) -> str | None:
    """Put a run's first weights into the model: drawn, or read from model.init_from.

    Returns the sha256 of the files that were read. redraw: the model has other weights meanwhile, of a
    snapshot that turned out damaged. Called by all processes. Raises UserError if weights that are read do not fit.
    """
    # A user's own model is drawn when it is built; the package's only here, since most starts have a snapshot.
    if redraw or not isinstance(config.model, Own):
        model.load_state_dict(build(config, source.vocabulary.size).state_dict())
    url = getattr(config.model, "init_from", None)
    if not url or not isinstance(model, LanguageModel):
        return None
    identity = start_from(model, url, source.vocabulary, world)
    if world.is_main:
        say(f"started from the weights of {url} (sha256 {identity[:16]})")
    return identity
