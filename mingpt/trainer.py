"""The loop: batches -> model -> reduction -> optimizer -> snapshot -> metrics. Read `train` from top to bottom.

Only the weights and `Update.state()` are state; everything else in here is a function of (config, step), so an attempt
that starts at any step with any number of processes computes what an undisturbed run would have.
"""

import math
import shlex
import time
from contextlib import nullcontext
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mingpt import own, resume
from mingpt.attempts import Attempt, is_visible
from mingpt.batches import BatchPlan, Share
from mingpt.config import Config, OwnModel
from mingpt.console import say
from mingpt.data.loader import load
from mingpt.data.source import Source
from mingpt.distributed import World
from mingpt.errors import FINISHED, STOPPED, Mistake
from mingpt.evaluation import evaluate
from mingpt.lifetime import Lifetime, Phase
from mingpt.metrics import MetricsLog, console_line
from mingpt.model import GPT
from mingpt.models import some, trainable
from mingpt.numerics import autocast_for, differences, fingerprint, pin
from mingpt.optim import Update, misfits, state_layout
from mingpt.proportions import proportions
from mingpt.redact import without_secrets
from mingpt.reduction import ExactReduction, FastReduction, Reduction
from mingpt.snapshot.format import Metrics, State
from mingpt.snapshot.reader import Loaded
from mingpt.snapshot.tiers import FLAGS, Content, Snapshots
from mingpt.tally import HostView, TallyExchange
from mingpt.weights.reading import start_from

SKIPPED_STEPS = 100  # in a row, after which a run has diverged; fp16 finds its first loss scale in fewer than 30


def train(config: Config, source: Source, model: nn.Module, world: World, lifetime: Lifetime) -> int:
    """Train to train.max_steps, or until somebody asks one of the processes to stop; returns the exit code.

    model: as `models.build` gives it, with the same first weights in every process.
    """
    pin(config, world.device)
    model = model.to(world.device)
    plan = BatchPlan(len(source.train), config.seed, config.global_size(world.size), config.batch.micro_size)
    update = Update(
        trainable(model),
        config.optimizer,
        config.schedule,
        global_size=plan.global_size,
        tokens_per_microbatch=plan.micro_size * config.model.block_size,
        fp16=config.precision == "fp16",
        device=world.device,
    )
    autocast = autocast_for(config, world.device)
    if isinstance(config.model, OwnModel):
        first = source.train[list(range(min(plan.micro_size, len(source.train))))]
        with autocast:
            own.try_out(model, config.model, [x.to(world.device) for x in first])

    # Everything above is equal in all processes by construction; everything below starts from the same snapshot.
    def state() -> State:
        return {"model": model.state_dict(), "optimizer": update.state()}

    state_bytes = 3 * sum(p.nbytes for p in model.parameters())  # weights and two moments
    snapshots = Snapshots(config, world, state_bytes, say)
    numerics = fingerprint(config, world.device, source.sha256)
    mixed = [d for other in world.gather(numerics) for d in differences(numerics, other)]
    if mixed and world.speaks:
        say(f"the processes compute differently ({', '.join(sorted(set(mixed)))}): bits depend on who computes what")
    start, history, changes, best_val_loss = 0, list[dict[str, Any]](), resume.Changes(), math.inf
    if loaded := snapshots.restore():
        _check_fits(loaded, config, source, model)
        start, history = loaded.manifest.step, loaded.manifest.history
        model.load_state_dict(loaded.state["model"])
        update.load(loaded.state["optimizer"])
        if loaded.manifest.metrics.best_val_loss is not None:
            best_val_loss = loaded.manifest.metrics.best_val_loss
        numerics["init_from"] = loaded.manifest.fingerprint.get("init_from")  # where the run began, not model.init_from
        changes = resume.check(loaded.manifest, config, numerics, world, say)
        if world.speaks:
            say(f"resumed from step {start} of {loaded.url} (digest {loaded.manifest.digest})")
        if start >= config.train.max_steps and snapshots.is_durable(loaded):
            snapshots.forget_hot()
            if world.speaks:
                say(f"nothing to do: the run has reached step {start}, and train.max_steps={config.train.max_steps}")
            return FINISHED
    elif isinstance(model, GPT) and (url := getattr(config.model, "init_from", None)):
        numerics["init_from"] = start_from(model, url, source.vocabulary, world)
        if world.speaks:
            say(f"started from the weights of {without_secrets(url)} (sha256 {numerics['init_from'][:16]})")
    buffers = own.copy_buffers(model)
    claim: Attempt | None = None

    def claim_attempt() -> int:
        nonlocal claim
        grew_from = (loaded.manifest.digest, loaded.manifest.attempt) if loaded else (None, 0)
        claim = Attempt.claim(config.run.dir, start, *grew_from)
        return claim.number

    attempt = world.ask_speaker(claim_attempt)
    blind = [rank for rank, sees in enumerate(world.gather(is_visible(config.run.dir, attempt))) if not sees]
    if blind:  # at once, and not at the first snapshot, hours later
        raise Mistake(
            f"run.dir={without_secrets(config.run.dir)} is not one place for all: process {blind[0]} does not see what "
            f"process 0 has written there; nodes with a disk each need a folder that all share, or a bucket"
        )
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    this_attempt = {
        "attempt": attempt,
        "from_step": start,
        "world_size": world.size,
        "at": now,
        "numerics": numerics,
        "conditional_puts": world.ask_speaker(lambda: snapshots.store.conditional_puts),
    }
    if changes:
        this_attempt["changes"] = changes
    history.append(this_attempt)

    lifetime.mark("load")
    if config.train.compile:
        model.compile()  # before DDP wraps it: see numerics.pin
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    mine = world.share(plan.microbatches)
    reduction: Reduction = (
        ExactReduction(ddp, plan.microbatches, world) if config.reduce == "exact" else FastReduction(ddp)
    )
    tallies, host_view = TallyExchange(world, plan.microbatches, wishes=1 + len(FLAGS)), HostView()
    work = Share(plan, mine, start, config.train.max_steps)
    microbatches = load(source.train, work, config.data.workers, config.world.timeout_seconds, world.device)

    metrics = MetricsLog(config.run.dir, attempt, say) if world.speaks else None

    def committed(step: int, digest: str, seconds: float) -> None:
        assert metrics
        say(f"step {step}: snapshot {digest[:16]} in {seconds:.2f} s")
        metrics.flush()

    provenance = {
        "run": config.run.name,
        "vocabulary": source.vocabulary.to_json(),
        "config": without_secrets(config.model_dump()),
        "fingerprint": numerics,
        "history": history,
    }
    snapshots.begin(provenance, attempt, claim, committed)
    if loaded and start >= config.train.max_steps:
        stored = snapshots.make_durable(loaded)
        if world.speaks:
            say(f"finished: step {start}, digest {stored}: only the memory of a node had it; now it is stored")
        lifetime.phase = Phase.OVER
        world.barrier()
        return FINISHED
    if world.speaks:
        say(
            f"attempt {attempt}: steps {start + 1} to {config.train.max_steps}, {world.size} processes on "
            f"{world.device.type} ({world.backend}), {plan.microbatches} microbatches of {plan.micro_size} x "
            f"{config.model.block_size} tokens, {sum(p.numel() for p in model.parameters()):,} parameters"
        )
        for line in proportions(plan, source, config):
            say(line)

    def content() -> Content:
        """What a snapshot of the step that has just been done holds."""
        return state(), Metrics.of(
            loss=tally.mean_loss(),
            val_loss=val_loss,
            best_val_loss=best_val_loss if math.isfinite(best_val_loss) else None,
        )

    last_log = time.monotonic()
    last_logged, stopping = start, False
    digest: str | None = None
    for step in range(start, config.train.max_steps):
        model.train()
        update.optimizer.zero_grad(set_to_none=True)
        losses, tokens = list[Tensor](), list[Tensor]()
        for microbatch in mine:
            tensors = [x.to(world.device, non_blocking=True) for x in next(microbatches)]
            torch.manual_seed(plan.dropout_seed(step, microbatch))
            last = microbatch == mine[-1]
            with nullcontext() if last else ddp.no_sync():
                with autocast:
                    loss, count = ddp(*tensors)
                losses.append(loss)
                tokens.append(count)
                if last:
                    tallies.start(losses, tokens, (lifetime.stop, *snapshots.flags()))
                if loss.requires_grad:  # else the microbatch uses no parameter, and its gradient is zeros
                    update.scaled(loss).backward()
            if not last:
                reduction.push(microbatch)
        reduction.finish()
        tally = tallies.finish()
        snapshots.before_update()
        norm = update(step, tally.tokens.to(world.device))

        done = step + 1
        if lifetime.phase is Phase.JOINED:
            lifetime.phase = Phase.TRAINING
            lifetime.mark("first step")
            if world.speaks:
                say("start: " + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in lifetime.marks.items()))
        wishes_to_stop, *flags = host_view(tally.wishes)
        stopping = wishes_to_stop > 0
        final = done == config.train.max_steps
        if done % config.train.log_every == 0 or final:
            mean_loss, grad_norm = tally.mean_loss(), float(norm)
            elapsed = time.monotonic() - last_log
            row = {
                "step": done,
                "loss": mean_loss,
                "lr": update.lr(step),
                "grad_norm": grad_norm,
                "tokens_per_second": (done - last_logged) * plan.global_size * config.model.block_size / elapsed,
                "step_seconds": elapsed / (done - last_logged),
                "world_size": world.size,
            }
            if metrics:
                metrics.write(row)
                say(console_line(row, config.train.max_steps) + ("" if math.isfinite(grad_norm) else "  SKIPPED"))
            last_log, last_logged = time.monotonic(), done
        if done % SKIPPED_STEPS == 0 and (skipped := update.skipped_in_a_row()) >= SKIPPED_STEPS:  # equal in all
            there = snapshots.keep()
            raise Mistake(
                f"nothing was learnt since step {done - skipped}: the gradients are not finite, so steps are skipped. "
                f"{_way_back(config, there)}"
            )
        val_loss, best = None, False
        if len(source.validation) and (final or (config.train.eval_every and done % config.train.eval_every == 0)):
            began = time.monotonic()
            figures = evaluate(
                model, source.validation, world, autocast, source.answer_length, seed=config.seed, step=done
            )
            val_loss, accuracy = figures.loss, figures.accuracy
            best = val_loss < best_val_loss
            best_val_loss = val_loss if best else best_val_loss
            if metrics:
                metrics.write(
                    {"step": done, "val_loss": val_loss} | ({} if accuracy is None else {"val_accuracy": accuracy})
                )
                say(
                    f"step {done}: validation loss {val_loss:.4f} (best {best_val_loss:.4f})"
                    + (
                        ""
                        if accuracy is None
                        else f", accuracy {accuracy:.2%} ({figures.right} of {figures.questions})"
                    )
                )
            last_log += time.monotonic() - began  # the next line's speed is that of training
        began = time.monotonic()
        due = final or stopping or snapshots.is_due(done, flags) or best
        if due and isinstance(config.model, OwnModel):
            own.check_buffers(model, buffers, config.model, world)
        if final or stopping:
            if not math.isfinite(tally.mean_loss()):
                _end_without_a_loss(config, world, done, final, snapshots)
            else:
                digest = snapshots.last(done, content(), stopping)
            break
        # While steps are skipped, nothing is learnt, and no snapshot may push the good ones out.
        if due and update.skipped_in_a_row() == 0:
            snapshots.after_step(done, content, flags, late=world.device.type == "cuda", best=best)
        last_log += time.monotonic() - began
    finished = world.from_speaker(final and digest is not None)
    snapshots.close()
    if metrics:
        metrics.close()
        say(f"{'finished' if finished else 'stopped on request'}: step {done}, digest {digest or 'not stored'}")
    # Before the barrier: an agent signals the workers that are left as soon as one has exited.
    lifetime.phase = Phase.OVER
    world.barrier()
    return FINISHED if finished else STOPPED


def _way_back(config: Config, newest: int) -> str:
    """newest: the step of the newest durable snapshot; 0: there is none."""
    run = shlex.quote(str(without_secrets(config.run.dir)))
    if not newest:
        return "The run has diverged, and nothing was stored: the same command with a lower optimizer.lr starts afresh"
    return (
        f"The run has diverged: give a lower optimizer.lr, and go back to a step before the trouble, {newest} at the "
        f"latest (`python -m mingpt.snapshots rewind {run} --step N`), or start in another run.dir"
    )


def _end_without_a_loss(config: Config, world: World, step: int, final: bool, snapshots: Snapshots) -> None:
    """A run whose loss is no number has nothing to store. Raises Mistake at its end; after a stop it may go on."""
    there = snapshots.keep()
    what = f"the loss of step {step} is not finite, so it was not stored"
    if final:
        raise Mistake(f"{what}. {_way_back(config, there)}")
    if world.speaks:
        say(f"{what}; the newest snapshot is that of step {there}")


def _check_fits(loaded: Loaded, config: Config, source: Source, model: nn.Module) -> None:
    """Raise Mistake unless the snapshot is one of this model over this vocabulary."""
    where = f"the snapshot of step {loaded.manifest.step} in {without_secrets(config.snapshot.dir)}"
    cure = "set the keys back, or take another run.dir"
    if loaded.manifest.vocabulary != source.vocabulary.to_json():
        changed = differences(loaded.manifest.config.get("data"), without_secrets(config.data.model_dump()), "data")
        raise Mistake(f"{where} has another vocabulary than the data ({', '.join(changed) or 'which changed'}): {cure}")
    model_problems = misfits({k: (v.shape, v.dtype) for k, v in model.state_dict().items()}, loaded.state["model"])
    if model_problems:
        changed = differences(loaded.manifest.config.get("model"), config.model.model_dump(), "model")
        raise Mistake(f"{where} is one of another model ({', '.join(changed) or some(model_problems)}): {cure}")
    # What it holds follows from its own config: parameters may have been frozen, or the precision changed, since.
    frozen, fp16 = _as_stored(loaded.manifest.config)
    named = [(n, p) for n, p in model.named_parameters() if not any(fnmatchcase(n, pattern) for pattern in frozen)]
    remembered = loaded.state["optimizer"]
    if problems := misfits(state_layout(named, fp16), remembered):
        raise Mistake(
            f"{where} does not have this optimizer's state: {some(problems)}: go on from another snapshot "
            f"(set this one's folder aside), or take another run.dir"
        )


def _as_stored(config: dict[str, Any]) -> tuple[list[str], bool]:
    """(train.freeze, whether the precision is fp16) of a manifest's config, which may hold anything."""
    train = config.get("train")
    patterns = train.get("freeze") if isinstance(train, dict) else None
    frozen = [p for p in patterns if isinstance(p, str)] if isinstance(patterns, list) else []
    return frozen, config.get("precision") == "fp16"
