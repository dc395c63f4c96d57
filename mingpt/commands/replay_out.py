"""`mingpt replay RUN@N --out DIR`: compute up to the step, and store its state with one writer."""

from argparse import Namespace

from mingpt.cli.command import Unfit
from mingpt.cli.console import printable, say
from mingpt.errors import FINISHED, UserError
from mingpt.history.history import History
from mingpt.replay.replaying import Again, Replay, replay
from mingpt.snapshot.attempts import NO_END
from mingpt.snapshot.format import Manifest, Metrics
from mingpt.snapshot.reader import manifest_or_none, run_dir_of
from mingpt.snapshot.retention import Retention
from mingpt.snapshot.store import SNAPSHOTS, Store
from mingpt.snapshot.writer import SnapshotWriter


def store(options: Namespace) -> int:
    """Write the state after options.step to options.out, unless a step on the way has other bits than were recorded."""
    if options.drop or options.set or options.then or options.json:
        raise UserError("--out writes the step as it was: leave out --drop, --set, --then and --json")
    step, past = options.step, History.open(options.url, options.attempt, options.snapshots)
    if not options.out.strip("/"):
        raise UserError(
            f"--out={options.out!r}: this is the root of the file system, or nothing: give a folder of its own"
        )
    target = Store(f"{run_dir_of(options.out)}/{SNAPSHOTS}", "--out")
    if target.root in (past.store.root, Store(f"{past.folder}/{SNAPSHOTS}").root):
        raise UserError(f"--out={target.url}: the run itself stays as it is: give another place")
    _refuse_another_run(past.store, target)
    if step in target.steps():
        raise UserError(f"--out={target.url}: step {step} is there already: give another place, or delete it first")
    with replay(past, step, options.overrides) as run:
        say(f"from {'step ' + str(run.base) if run.base else 'config and seed'} to step {step} of {past.folder}")
        while run.step < step:
            again = run.advance()
            if again.same is False:
                problem = f"step {again.step} has other bits than attempt {again.attempt} recorded: {again.bits()}"
                raise Unfit("\n".join([problem, *run.notes]) + ": nothing was written")
        for note in run.notes:
            say(note)
        if again.recorded is None:
            say("the run recorded no bits of this step: whether they are the same is not known")
        say(f"step {step}: {target.folder_url(step)}, digest {_write(run, again, target)}")
    return FINISHED


def _refuse_another_run(source: Store, target: Store) -> None:
    """Raise UserError if the target has a step of another run: a run there would be made of both."""
    ours = [manifest for step in source.steps() if (manifest := manifest_or_none(source, step))]
    for step in target.steps() if ours else []:
        theirs = manifest_or_none(target, step)
        if theirs and not any(_on_one_line(newer, theirs) for newer in ours):
            runs = printable(f"{theirs.run}, not {ours[0].run}")
            raise UserError(
                f"{target.url}: step {step} is there, of another run ({runs}): nothing was copied; give another place"
            )


def _on_one_line(newer: Manifest, older: Manifest) -> bool:
    """Whether the attempts that led to the older snapshot are the first of those that led to the newer one."""
    attempts = len(older.history)
    # If the same attempt has written both, histories are equal, and one attempt has one config.
    return older.history == newer.history[:attempts] and (attempts < len(newer.history) or older.config == newer.config)


def _write(run: Replay, again: Again, target: Store) -> str:
    """Store the state that `run` has; returns its digest."""
    stretch, section = run.stretch, run.stretch.config.get("run")
    known = again.recorded is not None and stretch.numerics  # then the bits were those of the run
    made = {"attempt": stretch.attempt, "from_step": stretch.first - 1, "numerics": run.numerics}
    provenance = {
        "run": str(section.get("name", "run")) if isinstance(section, dict) else "run",
        "vocabulary": run.bench.source.vocabulary.to_json(),
        "config": stretch.config,
        "fingerprint": stretch.numerics if known else run.numerics,
        "history": stretch.history or [made],
    }
    metrics = Metrics.of(loss=again.figures.loss, best_val_loss=run.past.best_val_loss(again.step))
    keep_all = Retention(keep=NO_END, orphan_age=0)
    writer = SnapshotWriter(target, run.world, keep_all, provenance, say)
    return writer.save(again.step, run.bench.state(), metrics)
