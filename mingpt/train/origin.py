"""What an attempt resumes from: the newest good snapshot, weights to start from, or nothing."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mingpt.cli.console import say
from mingpt.compute.numerics import differences, fingerprint
from mingpt.config.schema import Config
from mingpt.data.source import Source
from mingpt.snapshot.format import Kind, Manifest
from mingpt.snapshot.restore import Put, Restored
from mingpt.tiers.tiers import Tiers
from mingpt.train import resume
from mingpt.train.bad_steps import rolled_back
from mingpt.train.context import StepContext
from mingpt.world.clock import Clock
from mingpt.world.world import World

# Puts a run's first weights into the model (factory.first_weights), which whoever has built the model knows.
FirstWeights = Callable[[Config, Source, nn.Module, World, bool], str | None]


@dataclass
class Origin:
    """What an attempt resumes from."""

    # A snapshot; None: this is a new run.
    loaded: Restored | None
    # Steps done before.
    step: int
    # This attempt's fingerprint: what its bits depend on besides config and step.
    numerics: dict[str, Any]
    # An entry for each of the attempts that led to the snapshot.
    history: list[dict[str, Any]]
    # Settings that affect the result and have changed since the snapshot.
    changes: resume.Changes
    # Of the run so far; infinite before the first evaluation, or if evaluations take other samples now.
    best_val_loss: float


def restore(
    config: Config, source: Source, context: StepContext, tiers: Tiers, clock: Clock, first_weights: FirstWeights
) -> Origin:
    """Load the newest good snapshot; without one, the run's first weights.

    Raises UserError if the snapshot belongs to another experiment.
    """
    world = context.world
    with clock.within("device"):  # it multiplies matrices, for which a GPU loads libraries
        numerics = fingerprint(config, world.device, source.sha256)
    # A warning, no error: two kinds of GPU may train together, and only the promise of equal bits is lost.
    mixed = set[str]()
    for other in world.gather(numerics):
        mixed |= {*differences(numerics, other)}
    if mixed and world.is_main:
        say(
            f"WARNING: the processes have different numerics ({', '.join(sorted(mixed))}): the bits of the result "
            f"depend on which process computes what"
        )
    # Snapshots of which parts were taken over. The last one may have turned out damaged, after some of its parts.
    begun = list[Manifest]()

    def take(manifest: Manifest) -> Put:
        begun.append(manifest)
        return take_over(manifest, config, source, context)

    origin = Origin(tiers.restore(take), 0, numerics, [], resume.Changes(), math.inf)
    if begun and not origin.loaded:
        context.update.reset()
    if config.resume.changed and not origin.loaded and world.is_main:
        where = tiers.store.url  # a fork's copy may have failed
        say(f"WARNING: resume.changed=true, but there is no snapshot in {where}: this run starts at step 1")
    if origin.loaded:
        _resume(origin, origin.loaded, config, source, world)
        # Batches of rollbacks since that attempt: the snapshot is older than they are, so its state has none of them.
        context.drop(rolled_back(config, origin.loaded.manifest.attempt, world))
        return origin
    with clock.within("model"):
        read = first_weights(config, source, context.model, world, bool(begun))
    if read:
        numerics["init_from"] = read
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
    # A best loss of other samples would never be reached, or at once: "best" snapshots would be kept for nothing.
    other = resume.other_validation(manifest, config, source)
    if manifest.metrics.best_val_loss is not None and not other:
        origin.best_val_loss = manifest.metrics.best_val_loss
    origin.numerics["init_from"] = manifest.fingerprint.get("init_from")  # model.init_from is not read again
    origin.changes = resume.check(manifest, config, origin.numerics, world, say)
    if world.is_main:
        say(f"resumed from step {manifest.step} of {loaded.url} (digest {manifest.digest})")
        if other:
            say(other)
