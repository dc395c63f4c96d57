"""What an attempt resumes from: the newest good snapshot, weights to start from, or nothing; and its number.

It takes one unless another attempt of the run is still training.
"""

import math
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from torch import Tensor

from mingpt.compute.numerics import differences, fingerprint
from mingpt.config.schema import Config
from mingpt.config.section import Own
from mingpt.console import printable, say
from mingpt.data.source import Source
from mingpt.errors import UserError
from mingpt.model.language import LanguageModel
from mingpt.observe.ledger import accounts, duration
from mingpt.redact import without_secrets
from mingpt.snapshot import hot
from mingpt.snapshot.attempts import TRAIN, Attempt, RunRecord, is_visible, records, runs_here
from mingpt.snapshot.checkpointer import Checkpointer
from mingpt.snapshot.elsewhere import alone
from mingpt.snapshot.format import VALIDATION, Kind, Manifest
from mingpt.snapshot.restore import Put, Restored
from mingpt.train import resume
from mingpt.train.bad_steps import rolled_back
from mingpt.train.context import StepContext
from mingpt.train.factory import build
from mingpt.weights.reading import start_from
from mingpt.world.world import World

DYING_SECONDS = 5  # a process that was killed with its launcher frees its memory first
SEEN_SECONDS = 60  # an attempt on another machine that has noted something since then may be running


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
    """Load the newest good snapshot; without one, draw initial weights, or read those of model.init_from.

    Raises UserError if the snapshot belongs to another experiment.
    """
    world = context.world
    with context.hooks.phase("device"):  # it multiplies matrices, for which a GPU loads libraries
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
        context.update.reset()
    if not origin.loaded and (begun or not isinstance(config.model, Own)):  # a user's own is drawn already
        with context.hooks.phase("model"):
            context.model.load_state_dict(build(config, source.vocabulary.size).state_dict())
    if config.resume.changed and not origin.loaded and world.is_main:
        where = checkpointer.store.url  # a fork's copy may have failed
        say(f"WARNING: resume.changed=true, but there is no snapshot in {where}: this run starts at step 1")
    if origin.loaded:
        _resume(origin, origin.loaded, config, source, world)
        context.drop(rolled_back(config, origin.loaded.manifest.attempt, world))
    elif isinstance(context.model, LanguageModel) and (url := getattr(config.model, "init_from", None)):
        numerics["init_from"] = start_from(context.model, url, source.vocabulary, world)
        if world.is_main:
            say(f"started from the weights of {url} (sha256 {numerics['init_from'][:16]})")
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
    other = resume.other_validation(manifest, config, source)
    if manifest.metrics.best_val_loss is not None and not other:
        origin.best_val_loss = manifest.metrics.best_val_loss
    origin.numerics["init_from"] = manifest.fingerprint.get("init_from")  # model.init_from is not read again
    origin.changes = resume.check(manifest, config, origin.numerics, world, say)
    if world.is_main:
        say(f"resumed from step {manifest.step} of {loaded.url} (digest {manifest.digest})")
        if other:
            say(other)


def another_running(config: Config) -> str:
    """Describe another attempt of this run that seems to be training. Raises UserError if it is, on this machine."""
    claims = records(config.run.dir)
    newest = claims.get(max(claims, default=0))
    if newest is None or newest.by != TRAIN:
        return ""
    account = next((a for a in accounts(config.run.dir) if a.attempt == newest.number), None)
    silent, alive = time.time() - account.until if account else 0.0, runs_here(newest)
    deadline = time.monotonic() + (0 if config.resume.take_over or (account and account.end) else DYING_SECONDS)
    while alive and time.monotonic() < deadline:
        time.sleep(0.1)
        alive = runs_here(newest)
    seen_elsewhere = alive is None and account is not None and silent < SEEN_SECONDS
    if (account and account.end) or not (alive or seen_elsewhere):
        return ""
    process = newest.process or {}
    seen = f", last seen {duration(max(0.0, silent))} ago" if account else ""
    host = process.get("host") or (account and account.host)
    who = printable(f"attempt {newest.number} ({host}, pid {process.get('pid')}{seen})")
    if alive and not config.resume.take_over:
        raise UserError(
            f"run.dir={config.run.dir}: {who} is training this run on this machine: stop it, give "
            f"this run another run.name, or take over with resume.take_over=true"
        )
    return f"{who} seems to be running: this attempt takes over"


def claim_attempt(
    config: Config, source: Source, origin: Origin, checkpointer: Checkpointer, world: World
) -> RunRecord:
    """Take this attempt's number in run.dir. Raises UserError unless all who see run.dir see what rank 0 wrote."""
    claims, home = list[Attempt](), checkpointer.home  # claims: stays empty in other processes than rank 0

    def claim() -> int:
        parent = (origin.loaded.manifest.digest, origin.loaded.manifest.attempt) if origin.loaded else (None, 0)
        if another := another_running(config):  # it may have started meanwhile
            say(another)
        hot.run_id(config.run.dir)  # a run that was claimed has an id
        claims.append(Attempt.claim(config.run.dir, origin.step, *parent))
        return claims[0].number

    attempt = world.run_on_main(claim)
    sees = world.rank not in home.run or is_visible(config.run.dir, attempt)
    blind = [rank for rank, sees in enumerate(world.gather(sees)) if not sees]
    if blind:  # checked now: the first snapshot would fail, perhaps hours later
        raise UserError(
            f"run.dir={config.run.dir} is not shared by all: process {blind[0]} does not see what "
            f"process 0 has written there: take a folder that all nodes share, or a bucket"
        )
    this_attempt = {
        "attempt": attempt,
        "from_step": origin.step,
        "world_size": world.size,
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "numerics": origin.numerics,
        "conditional_puts": world.run_on_main(lambda: checkpointer.store.conditional_puts),
    }
    if home.host:
        this_attempt["disk"] = home.host
        if world.is_main:
            say(f"WARNING: {alone(config.run.dir, home.host)}")
    if validation := resume.validation_of(config, source):
        this_attempt[VALIDATION] = validation
    if origin.changes:
        this_attempt["changes"] = origin.changes
    provenance = {
        "run": config.run.name,
        "vocabulary": source.vocabulary.to_json(),
        # Here, not only in the manifest: trackers get it, and what equality of bits is named by must be the same later.
        "config": without_secrets(config.model_dump()),
        "fingerprint": origin.numerics,
        "history": [*origin.history, this_attempt],
    }
    return RunRecord(attempt, claims[0] if claims else None, provenance)
