"""Claims an attempt's number in run.dir, unless another attempt of the run is still training.

Two at a time would write snapshots of two pasts.
"""

import time
from dataclasses import dataclass

from mingpt.cli.console import printable, say
from mingpt.config.configfile import public_config
from mingpt.config.schema import Config
from mingpt.data.source import Source
from mingpt.errors import UserError
from mingpt.files.folder import alone
from mingpt.observe.ledger import accounts, duration
from mingpt.snapshot.attempts import TRAIN, Attempt, RunRecord, is_visible, records, runs_here, utc_now
from mingpt.snapshot.format import VALIDATION
from mingpt.tiers import hot
from mingpt.tiers.tiers import Tiers
from mingpt.train import resume
from mingpt.train.context import StepContext
from mingpt.train.origin import Origin
from mingpt.world.lifetime import Lifetime
from mingpt.world.world import World

DYING_SECONDS = 5  # a process that was killed with its launcher frees its memory first
SEEN_SECONDS = 60  # an attempt on another machine that has noted something since then may be running


@dataclass(frozen=True)
class Claimed:
    """What an attempt has once it is claimed."""

    config: Config
    source: Source
    # What computes its steps, with the state that it begins from.
    context: StepContext
    tiers: Tiers
    # What it resumes from.
    origin: Origin
    # Its number, and what its snapshots store beside the state.
    record: RunRecord
    lifetime: Lifetime


def another_running(config: Config) -> str:
    """Describe another attempt of this run that seems to be training. Raises UserError if it is, on this machine."""
    claims = records(config.run.dir)
    newest = claims.get(max(claims, default=0))
    if newest is None or newest.by != TRAIN:
        return ""
    account = next((a for a in accounts(config.run.dir) if a.attempt == newest.number), None)
    silent = time.time() - account.until if account else 0.0
    # None: that attempt's process was on another machine, where only its notes tell whether it still runs.
    alive = runs_here(newest)
    # A launcher that restarts its workers at once meets those that it has killed.
    no_wait = config.resume.take_over or (account and account.end)
    deadline = time.monotonic() + (0 if no_wait else DYING_SECONDS)
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


def claim_attempt(config: Config, source: Source, origin: Origin, tiers: Tiers, world: World) -> RunRecord:
    """Take this attempt's number in run.dir. Raises UserError unless all who see run.dir see what rank 0 wrote."""
    home = tiers.home
    claims = list[Attempt]()  # stays empty in other processes than rank 0

    def claim() -> int:
        parent = (origin.loaded.manifest.digest, origin.loaded.manifest.attempt) if origin.loaded else (None, 0)
        if another := another_running(config):  # it may have started meanwhile
            say(another)
        hot.run_id(config.run.dir)  # a run that was claimed has an id
        claims.append(Attempt.claim(config.run.dir, origin.step, *parent))
        return claims[0].number

    attempt = world.run_on_main(claim)
    # At once: a node that has nothing of the run yet would begin another one, if the node that has it is lost now.
    tiers.note_home(attempt)
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
        "at": utc_now(),
        "numerics": origin.numerics,
        "conditional_puts": world.run_on_main(lambda: tiers.store.conditional_puts),
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
        "config": public_config(config),
        "fingerprint": origin.numerics,
        "history": [*origin.history, this_attempt],
    }
    return RunRecord(attempt, claims[0] if claims else None, provenance)
