"""What an attempt resumes from: the newest good snapshot, weights to start from, or nothing."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mingpt.compute.numerics import differences, fingerprint
from mingpt.config.schema import Config
from mingpt.console import say
from mingpt.data.source import Source
from mingpt.model.language import LanguageModel
from mingpt.redact import without_secrets
from mingpt.snapshot.checkpointer import Checkpointer
from mingpt.snapshot.format import Kind, Manifest
from mingpt.snapshot.restore import Put, Restored
from mingpt.train import resume
from mingpt.train.bad_steps import rolled_back
from mingpt.train.context import StepContext
from mingpt.train.factory import build
from mingpt.weights.reading import start_from
from mingpt.world.world import World


@dataclass
class Origin:
    """What an attempt resumes from.

    loaded: a snapshot; None: this is a new run. numerics: this attempt's fingerprint. history: of the attempts before.
    """

    loaded: Restored | None
    step: int
    numerics: dict[str, Any]
    history: list[dict[str, Any]]
    changes: resume.Changes
    best_val_loss: float


def restore(config: Config, source: Source, context: StepContext, checkpointer: Checkpointer) -> Origin:
    """Load the newest good snapshot; without one, the weights of model.init_from, if that is set.

    Raises UserError if the snapshot belongs to another experiment.
    """
    world = context.world
    numerics = fingerprint(config, world.device, source.sha256)
    mixed = [d for other in world.gather(numerics) for d in differences(numerics, other)]
    if mixed and world.is_main:
        say(
            f"WARNING: the processes have different numerics ({', '.join(sorted(set(mixed)))}): the bits of the result "
            f"depend on which process computes what"
        )
    begun = list[Manifest]()

    def take(manifest: Manifest) -> Put:
        begun.append(manifest)
        return take_over(manifest, config, source, context)

    origin = Origin(checkpointer.restore(take), 0, numerics, [], resume.Changes(), math.inf)
    if begun and not origin.loaded:  # parts of a damaged snapshot were taken over
        context.model.load_state_dict(build(config, source.vocabulary.size).state_dict())
        context.update.reset()
    if config.resume.changed and not origin.loaded and world.is_main:
        where = checkpointer.store.url  # a fork's copy may have failed
        say(f"WARNING: resume.changed=true, but there is no snapshot in {where}: this run starts at step 1")
    if origin.loaded:
        _resume(origin, origin.loaded, config, source, world)
        context.drop(rolled_back(config, origin.loaded.manifest.attempt, world))
    elif isinstance(context.model, LanguageModel) and (url := getattr(config.model, "init_from", None)):
        numerics["init_from"] = start_from(context.model, url, source.vocabulary, world)
        if world.is_main:
            say(f"started from the weights of {without_secrets(url)} (sha256 {numerics['init_from'][:16]})")
    return origin


def take_over(manifest: Manifest, config: Config, source: Source, context: StepContext) -> Put:
    """Return what loads a snapshot's parts. Raises UserError if the snapshot is of another run."""
    resume.check_fits(manifest, config, source.vocabulary.to_json(), context.model, context.update.own)
    context.update.reset()

    def put(kind: Kind, tensors: dict[str, Tensor]) -> None:
        if kind == "model":
            context.model.load_state_dict(tensors, strict=False)  # those of one part
        else:
            context.update.load(tensors)

    return put


def _resume(origin: Origin, loaded: Restored, config: Config, source: Source, world: World) -> None:
    manifest = loaded.manifest
    origin.step, origin.history = manifest.step, manifest.history
    other = resume.other_validation(manifest, config, source.validation)
    if manifest.metrics.best_val_loss is not None and not other:
        origin.best_val_loss = manifest.metrics.best_val_loss
    origin.numerics["init_from"] = manifest.fingerprint.get("init_from")  # model.init_from is not read again
    origin.changes = resume.check(manifest, config, origin.numerics, world, say)
    if world.is_main:
        say(f"resumed from step {manifest.step} of {loaded.url} (digest {manifest.digest})")
        if other:
            say(other)
