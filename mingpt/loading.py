"""The model and the vocabulary of a snapshot, which may be a stranger's: nothing in it is imported or run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mingpt.data.vocabulary import Vocabulary, vocabulary_of
from mingpt.errors import Mistake
from mingpt.model import GPT
from mingpt.models import gpt_of
from mingpt.snapshot.format import Damaged, Manifest
from mingpt.snapshot.reader import read
from mingpt.snapshots import find


@dataclass(frozen=True)
class Opened:
    """A snapshot's model, on the CPU and in evaluation mode. where: its folder, without secrets."""

    model: GPT
    vocabulary: Vocabulary
    manifest: Manifest
    where: str


def open_model(url: str, step: int | None = None, agree: Callable[[int], int] = lambda step: step) -> Opened:
    """The newest snapshot's model, or that of `step`, built from the manifest's config alone.

    agree: has several processes take the same step. Raises Mistake if the snapshot is damaged or not one of ours.
    """
    found = find(url, step)
    chosen = agree(found.steps[0])
    where = found.store.folder_url(chosen)
    try:
        loaded = read(found.store, chosen, kinds=("model",))
    except Damaged as damage:
        raise Mistake(f"{where}: {damage}: choose another with --step") from damage
    vocabulary = vocabulary_of(loaded.manifest.vocabulary)
    model = gpt_of(loaded.manifest.config, loaded.state["model"], vocabulary.size, where)
    if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
        raise Mistake(f"{where}: its weights are not all finite numbers: choose another with --step")
    return Opened(model, vocabulary, loaded.manifest, where)
