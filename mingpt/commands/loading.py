"""Load the model and the vocabulary of a snapshot that may come from anybody: nothing in it is imported or run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mingpt.data.vocabulary import Vocabulary, vocabulary_of
from mingpt.errors import UserError
from mingpt.model.language import LanguageModel
from mingpt.snapshot.format import Manifest
from mingpt.snapshot.reader import damage_as, find, kind_of, read, read_manifest
from mingpt.snapshot.store import Store
from mingpt.train.factory import gpt_of

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


def open_model(url: str, step: int | None = None, agree: Callable[[int], int] = lambda step: step) -> Opened:
    """The newest snapshot's model, or that of `step`, built from the manifest's config alone.

    agree: maps this process's newest step to the step that all processes take, such as rank 0's. Raises UserError if
    the snapshot is damaged, of another format, or not of a GPT.
    """
    found = find(url, step)
    step = agree(found.steps[0])
    with damage_as(UserError, found.store, step, ANOTHER):
        return load(found.store, step)


def device_of(wanted: str) -> torch.device:
    """The device that --device names; auto: a GPU where there is one. Raises UserError."""
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise UserError("--device cuda: torch finds no GPU here; nvidia-smi shows whether the driver does")
    return torch.device("cuda" if there and wanted != "cpu" else "cpu")


def load(store: Store, step: int) -> Opened:
    """One snapshot's model. Allocates memory only after the manifest's tensors match the model that its config gives.

    Raises Damaged, and UserError if it is of another format, not of a GPT, or has weights that are not finite.
    """
    manifest, where = read_manifest(store, step), store.folder_url(step)
    vocabulary = vocabulary_of(manifest.vocabulary)
    shapes = {n: (t.dtype, t.shape) for n, t in manifest.tensors.items() if kind_of(t.part) == "model"}
    model = gpt_of(manifest.config, shapes, vocabulary.size, where)
    weights = read(store, step, kinds=("model",), manifest=manifest).state["model"]
    model.to_empty(device="cpu").load_state_dict(weights)
    if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
        raise UserError(f"{where}: its weights are not all finite numbers{ANOTHER}")
    return Opened(model.eval(), vocabulary, manifest, where)
