"""Load the model and the vocabulary of a snapshot that may come from anybody: nothing in it is imported or run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError

from mingpt.config.keys import KINDS
from mingpt.config.models import GPTModel, Language
from mingpt.data.source import Vocabulary
from mingpt.data.vocabulary import vocabulary_of
from mingpt.errors import UserError
from mingpt.model.building import build_language_model
from mingpt.model.language import LanguageModel
from mingpt.snapshot.format import Manifest
from mingpt.snapshot.reader import damage_as, find, kind_of, read_manifest, read_parts
from mingpt.snapshot.store import Store

ANOTHER = ": choose another with --step"


@dataclass(frozen=True)
class Opened:
    """A snapshot's model, on the CPU and in evaluation mode. where: its folder, without secrets."""

    model: LanguageModel
    vocabulary: Vocabulary
    manifest: Manifest
    where: str


def find_manifest(url: str, step: int | None = None) -> tuple[Store, Manifest]:
    """The store under a URL, and the newest snapshot's manifest, or that of `step`. Raises UserError if damaged."""
    found = find(url, step)
    with damage_as(UserError, found.store, found.steps[0], ANOTHER):
        return found.store, read_manifest(found.store, found.steps[0])


def open_model(
    url: str, step: int | None = None, agree: Callable[[int], int] = lambda step: step, ema: bool = False
) -> Opened:
    """The newest snapshot's model, or that of `step`, built from the manifest's config alone.

    agree: maps this process's newest step to the step that all processes take, such as rank 0's. ema: see `load`.
    Raises UserError as that, and if the snapshot is damaged.
    """
    found = find(url, step)
    step = agree(found.steps[0])
    with damage_as(UserError, found.store, step, ANOTHER):
        return load(found.store, step, ema)


def device_of(wanted: str) -> torch.device:
    """The device that --device names; auto: a GPU where there is one. Raises UserError."""
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise UserError("--device cuda: torch finds no GPU here; nvidia-smi shows whether the driver does")
    return torch.device("cuda" if there and wanted != "cpu" else "cpu")


def load(store: Store, step: int, ema: bool = False) -> Opened:
    """One snapshot's model. Allocates memory only after the manifest's tensors match the model that its config gives.

    ema: with the mean of the weights in their place. Raises Damaged, and UserError if it is of another format, not of a
    GPT, without such a mean, or has weights that are not finite.
    """
    manifest, where = read_manifest(store, step), store.folder_url(step)
    vocabulary = vocabulary_of(manifest.vocabulary)
    tensors = {n: t for n, t in manifest.tensors.items() if kind_of(t.part) == "model"}
    means = {n: f"{n}.ema" for n in tensors if ema and f"{n}.ema" in manifest.tensors}  # of a frozen one there is none
    if ema and not means:
        raise UserError(f"{where} has no mean of the weights (optimizer.ema): leave out --ema, or choose another step")
    tensors |= {name: manifest.tensors[mean] for name, mean in means.items()}
    shapes = {name: (t.dtype, t.shape) for name, t in tensors.items()}
    model = gpt_of(manifest.config, shapes, vocabulary.size, where)
    model.to_empty(device="cpu")
    of = {means.get(name, name): name for name in tensors}
    for _, (_, found) in read_parts(store, manifest, sorted({t.part for t in tensors.values()})):
        model.load_state_dict({of[key]: t for key, t in found.items() if key in of}, strict=False)
    if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
        raise UserError(f"{where}: its weights are not all finite numbers{ANOTHER}")
    return Opened(model.eval(), vocabulary, manifest, where)


def language_kind(name: object) -> type[Language]:
    """The kind of language model of that name; of GPT-2 if there is none."""
    found = KINDS["model"].get(str(name), GPTModel)
    return found if issubclass(found, Language) else GPTModel


def gpt_of(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[str, Sequence[int]]], vocab_size: int, where: str
) -> LanguageModel:
    """The GPT that a snapshot's manifest describes, on the meta device: without memory for its weights.

    shapes: dtype and shape of each of the snapshot's weights. where: names the snapshot in messages. Raises UserError
    if the snapshot is not one of this package's GPT. Nothing is imported because a manifest names it.
    """
    section = config.get("model")
    if isinstance(section, dict) and section.get("kind") == "own":
        raise UserError(
            f"{where}: a snapshot of {section.get('_target_')!r}, not of mingpt's GPT: load its model-*.safetensors "
            f"in a program of your own"
        )
    other = f"{where}: not a snapshot of a GPT of this version: "
    try:
        kind = section.get("kind") if isinstance(section, dict) else None
        model = language_kind(kind).model_validate(section)
        if problem := model.problem():
            raise ValueError(problem)
        if differences := _differences(model, vocab_size, shapes):
            raise ValueError(differences)
        with torch.device("meta"):
            return build_language_model(model, vocab_size)
    except (ValidationError, ValueError, TypeError, RuntimeError, OverflowError) as error:  # torch's: absurd sizes
        raise UserError(f"{other}{str(error).splitlines()[0]}") from error


def _differences(model: Language, vocab_size: int, shapes: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    """The first difference between a snapshot's tensors and the GPT of its config; empty if there is none.

    Builds one layer only, since a config may claim millions of them.
    """
    with torch.device("meta"):
        small = build_language_model(model.model_copy(update={"n_layer": 1}), vocab_size)
    one, prefix = small.state_dict(), small.LAYER
    layer = {name: tensor for name, tensor in one.items() if name.startswith(prefix)}
    if len(shapes) != len(one) + (model.n_layer - 1) * len(layer):
        return f"n_layer={model.n_layer}, and {len(shapes)} tensors"
    expected = {name: tensor.shape for name, tensor in one.items()}
    for i in range(1, model.n_layer):
        here = prefix.replace(".0.", f".{i}.")
        expected |= {name.replace(prefix, here, 1): tensor.shape for name, tensor in layer.items()}
    for name, wanted in expected.items():
        dtype, found = shapes.get(name, ("none", []))
        if (dtype, list(found)) != ("F32", list(wanted)):
            return f"{name} should be F32 {list(wanted)}, and is {dtype} {list(found)}"
    return ""
