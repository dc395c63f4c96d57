"""What happens step by step. Read `train` from top to bottom; session.py builds the Run, step.py is one step.

Only the weights and `Update.state()` are state; everything else in here is a function of (config, step), so an attempt
that starts at any step with any number of processes computes what an undisturbed run would have.
"""

import math
from functools import partial

from mingpt.config.schema import OwnModel
from mingpt.console import say
from mingpt.errors import FINISHED, STOPPED
from mingpt.observe.events import AttemptEnded, Evaluated, StepDone
from mingpt.snapshot.checkpointer import Content
from mingpt.snapshot.format import Metrics
from mingpt.train import own_model
from mingpt.train.divergence import check_divergence, leave_without_a_loss
from mingpt.train.evaluation import evaluate
from mingpt.train.run import Run
from mingpt.train.stats import StepStats
from mingpt.train.step import train_step
from mingpt.world.lifetime import Phase


def train(run: Run) -> int:
    """Train to train.max_steps, or until a process is asked to stop; returns the exit code.

    Every decision is made alike in all processes, from what travels with the step.
    """
    clock, checkpointer = run.lifetime.clock, run.checkpointer
    reporter = Reporter(run)
    for step in range(run.start, run.last_step):
        stats = train_step(run, step)
        done, last = step + 1, step + 1 == run.last_step
        if step == run.start:
            _say_how_the_start_was(run)
        stop, *flags = run.read_flags(stats.flags)
        if run.observers.wants(done):
            reporter.report(done, stats)
        check_divergence(run, done)
        with clock.within("evaluation"):
            val_loss, best = _evaluate_if_due(run, done, last)
        with clock.within("snapshot"):
            due = last or stop > 0 or checkpointer.is_due(done, flags) or best
            if due and isinstance(run.config.model, OwnModel):
                own_model.check_buffers(run.compute.model, run.compute.buffers, run.config.model, run.world)
            if last or stop > 0:
                return _end(run, done, _content(run, stats, val_loss), last, stopping=stop > 0)
            # While steps are skipped, nothing is learnt, and no snapshot may push the good ones out.
            if due and run.compute.update.skipped_in_a_row() == 0:
                late = run.world.device.type == "cuda"
                checkpointer.after_step(done, partial(_content, run, stats, val_loss), flags, late=late, best=best)
    raise AssertionError("the last step returns")


def _say_how_the_start_was(run: Run) -> None:
    run.lifetime.phase = Phase.TRAINING
    if run.world.speaks:
        clock = run.lifetime.clock
        parts = {name: clock.seconds(name) for name in ("import", "data", "rendezvous", "load")}
        parts["first step"] = clock.seconds("step")
        say("start: " + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in parts.items()))


class Reporter:
    """Tells observers of steps; knows which one it told last, and how long training had taken by then."""

    def __init__(self, run: Run) -> None:
        self.run, self.step, self.seconds = run, run.start, 0.0

    def report(self, done: int, stats: StepStats) -> None:
        run, plan = self.run, self.run.compute.plan
        loss, grad_norm = stats.mean_loss(), stats.norm()  # here the host waits for the device
        seconds = run.lifetime.clock.seconds("step")
        took, steps = seconds - self.seconds, done - self.step
        self.step, self.seconds = done, seconds
        run.observers.publish(
            StepDone(
                step=done,
                loss=loss,
                lr=run.compute.update.lr(done - 1),
                grad_norm=grad_norm,
                tokens_per_second=steps * plan.global_size * run.config.model.block_size / took,
                step_seconds=took / steps,
                world_size=run.world.size,
            )
        )


def _evaluate_if_due(run: Run, done: int, last: bool) -> tuple[float | None, bool]:
    """The validation loss after this step, and whether it is the best so far; (None, False): none was due."""
    every = run.config.train.eval_every
    if not len(run.source.validation) or not (last or (every and done % every == 0)):
        return None, False
    compute, source = run.compute, run.source
    figures = evaluate(
        compute.model,
        source.validation,
        run.world,
        compute.autocast,
        source.answer_length,
        seed=run.config.seed,
        step=done,
    )
    best = figures.loss < run.best_val_loss
    run.best_val_loss = figures.loss if best else run.best_val_loss
    run.observers.publish(Evaluated(done, figures.loss, run.best_val_loss, figures.right, figures.questions))
    return figures.loss, best


def _content(run: Run, stats: StepStats, val_loss: float | None) -> Content:
    """What a snapshot of the step that has just been done holds."""
    best = run.best_val_loss if math.isfinite(run.best_val_loss) else None
    return run.compute.state(), Metrics.of(loss=stats.mean_loss(), val_loss=val_loss, best_val_loss=best)


def _end(run: Run, done: int, content: Content, last: bool, stopping: bool) -> int:
    """The attempt's last snapshot. FINISHED only if the run's last step is durable."""
    digest = None
    if content[1].loss is None:
        leave_without_a_loss(run, done, last)
    else:
        digest = run.checkpointer.last(done, content, stopping)
    finished = bool(run.world.from_speaker(last and digest is not None))
    run.checkpointer.close()
    run.observers.publish(AttemptEnded(done, finished, digest))
    # Before the barrier: an agent signals the workers that are left as soon as one has exited.
    run.lifetime.phase = Phase.OVER
    run.world.barrier()
    return FINISHED if finished else STOPPED
