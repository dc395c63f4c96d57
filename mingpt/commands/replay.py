"""What `mingpt replay` does: compute the steps, look at the last one, and show it as text or JSON.

With --out: compute up to the step, and store its state with one writer.
"""

import math
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from mingpt.cli.command import UNFIT, Unfit
from mingpt.cli.console import as_lines, complain, printable, say, say_json, shortened
from mingpt.data.source import TextVocabulary, Vocabulary
from mingpt.errors import FINISHED, UserError
from mingpt.history.history import History
from mingpt.model.language import LanguageModel
from mingpt.replay.closeup import Sample, clip_factor, layers, look
from mingpt.replay.replaying import AS_IT_WAS, Again, Change, Replay, replay
from mingpt.snapshot.attempts import NO_END
from mingpt.snapshot.format import Manifest, Metrics
from mingpt.snapshot.reader import manifest_or_none, run_dir_of, split_url
from mingpt.snapshot.retention import Retention
from mingpt.snapshot.store import SNAPSHOTS, Store
from mingpt.snapshot.writer import SnapshotWriter

Shown = dict[str, Any]
LONGEST = 100  # characters of a sample in a line
MOST = 500  # and in JSON


def replay_command(options: Namespace) -> int:
    options.url, step = split_url(options.url)
    if step is None and options.step is None:
        raise UserError(f"{options.url}: write RUN@N, such as runs/a@1200")
    options.step = step if options.step is None else options.step
    if options.out is not None:
        return _store(options)
    if options.then < 0 or options.samples < 0:
        raise UserError("--then and --samples take numbers of at least 0")
    change = Change(tuple(options.set), _positions(options.drop))
    past = History.open(options.url, options.attempt, options.snapshots)
    with replay(past, options.step, options.overrides) as run:
        shown = _compute(run, options, change)
    for note in shown["notes"]:
        complain(note)
    say_json(shown) if options.json else say(as_text(shown))
    return UNFIT if shown["first_different"] else FINISHED


def _positions(text: str) -> frozenset[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if bad := [word for word in words if not word.isdecimal()]:
        raise UserError(f"--drop {bad[0]}: give positions in the batch, counted from 0: --drop 17,93")
    return frozenset(map(int, words))


def _compute(run: Replay, options: Namespace, change: Change) -> Shown:
    run.check(change.settings)
    steps = [run.advance() for _ in range(run.step + 1, options.step)]
    run.prepare()
    saved = run.save()
    was, closeup = _look(run, AS_IT_WAS, options.samples)
    steps.append(was)
    different = next((again for again in steps if again.same is False), None)
    shown: Shown = {
        "run": run.past.folder,
        "step": options.step,
        "attempt": was.attempt,
        "from_step": run.base,
        "verdict": _verdict(steps, different),
        "first_different": different.step if different else None,
        "notes": run.notes,
        "steps": [_bits(again) for again in steps],
        "as_it_was": closeup,
    }
    if change != AS_IT_WAS:
        run.go_back(saved)
        run.prepare(change.settings)
        _check_drop(run, change.drop)
        _, shown["changed"] = _look(run, change, options.samples)
        shown["change"] = {"drop": sorted(change.drop), "set": list(change.settings)}
        shown["change_text"] = _text_of(change, options.step)
    after = Change(change.settings)
    shown["then"] = [_bits(run.advance(after)) for _ in range(options.then)]
    return shown


def _check_drop(run: Replay, drop: frozenset[int]) -> None:
    size = len(run.bench.context.plan.sample_ids(run.step))
    if drop and not isinstance(run.bench.context.model, LanguageModel):
        raise UserError("--drop: which targets a model of one's own counts is not known: leave it out")
    if far := [p for p in sorted(drop) if p >= size]:
        raise UserError(f"--drop {far[0]}: the step has the positions 0 to {size - 1}")
    if len(drop) == size:
        raise UserError("--drop: no sample would be left: leave one in")


def _look(run: Replay, change: Change, samples: int) -> tuple[Again, Shown]:
    """Do the step that `run` is prepared for, under the lens."""
    bench, step = run.bench, run.step
    before = {name: p.detach().clone() for name, p in bench.context.model.named_parameters()}
    seen, largest = look(bench, step, change.drop)
    again = run.advance(change)
    figures = again.figures
    ordered = sorted((s for s in seen if not math.isnan(s.loss)), key=lambda s: -s.loss)
    ordered += [s for s in seen if math.isnan(s.loss) and s.targets]  # not finite: the worst there are
    best = ordered[max(samples, len(ordered) - samples) :]
    return again, {
        "loss": figures.loss,
        "grad_norm": figures.grad_norm,
        "lr": again.lr,
        "clip_norm": bench.config.optimizer.clip_norm,
        "clip_factor": clip_factor(bench, figures),
        "targets": figures.tokens,
        "skipped": figures.skips > 0,
        "loss_scale": float(bench.context.update.loss_scale) if bench.config.precision == "fp16" else None,
        "losses": [s.loss for s in seen],
        "worst": [_shown(s, bench.source.vocabulary) for s in ordered[:samples]],
        "best": [_shown(s, bench.source.vocabulary) for s in reversed(best)],
        "layers": [asdict(layer) for layer in layers(bench, before, figures, largest)],
    }


def _shown(sample: Sample, vocabulary: Vocabulary) -> Shown:
    """A training sample for people and for JSON: what is known of it, and its `text`."""
    known = {k: v for k, v in asdict(sample).items() if k != "tokens"}
    if isinstance(vocabulary, TextVocabulary):
        text = vocabulary.decode([token for token in sample.tokens if token < vocabulary.size])
    else:
        text = " ".join(map(str, sample.tokens))
    return known | {"text": shortened(text, MOST)}


def _bits(again: Again) -> Shown:
    bits = again.recorded
    return {
        "step": again.step,
        "attempt": again.attempt,
        "loss": again.figures.loss,
        "grad_norm": again.figures.grad_norm,
        "skipped": again.figures.skips > 0,
        "recorded_loss": bits.loss if bits else None,
        "recorded_grad_norm": bits.grad_norm if bits else None,
        "same": again.same,
    }


def _verdict(steps: list[Again], different: Again | None) -> str:
    if different:
        return (
            f"OTHER BITS: step {different.step} differs first from what attempt {different.attempt} recorded: "
            f"{different.bits()}"
        )
    compared = [again for again in steps if again.same]
    if not compared:
        return "nothing to compare with: the run recorded no bits of these steps"
    attempts = ", ".join(str(n) for n in dict.fromkeys(again.attempt for again in compared))
    first, last = compared[0].step, compared[-1].step
    which = f"step {last}" if first == last else f"steps {first} to {last}"
    word = "attempts" if "," in attempts else "attempt"
    return f"{which}: same loss and norm bits as recorded by {word} {attempts}"


def as_text(shown: Shown) -> str:
    begin = f"step {shown['from_step']}'s snapshot" if shown["from_step"] else "config and seed"
    lines = [shown["verdict"], f"step {shown['step']} of {shown['run']}, computed from {begin}"]
    lines += _closeup(shown["as_it_was"])
    if "changed" in shown:
        lines += ["", f"CHANGED: {shown['change_text']}", *_against(shown), *_closeup(shown["changed"])]
    if shown["then"]:
        lines += ["", f"{'then step':>9}  {'loss now':>10}  {'recorded':>10}  {'difference':>10}  {'norm now':>10}"]
        lines += [
            f"{row['step']:>9}  {row['loss']:>10.4f}  {_or_dash(row['recorded_loss']):>10}  {_apart(row):>10}  "
            f"{row['grad_norm']:>10.4f}{'  skipped' if row['skipped'] else ''}"
            for row in shown["then"]
        ]
    return as_lines(lines)


def _text_of(change: Change, step: int) -> str:
    without = [f"without the samples at {', '.join(map(str, sorted(change.drop)))}"] if change.drop else []
    return "; ".join([*without, *(f"{text} from step {step} on" for text in change.settings)])


def _against(shown: Shown) -> list[str]:
    was, now = shown["as_it_was"], shown["changed"]
    return [f"{key:<15}{was[name]:.6g} -> {now[name]:.6g}" for key, name in FIGURES.items() if was[name] != now[name]]


FIGURES = {"loss": "loss", "gradient norm": "grad_norm", "learning rate": "lr", "clip factor": "clip_factor"}


def _closeup(seen: Shown) -> list[str]:
    factor, longest = seen["clip_factor"], seen["clip_norm"]
    clipped = f"scaled by {factor:.4f} to {longest:g}" if factor < 1 else "not clipped"
    scale = f", fp16 loss scale {seen['loss_scale']:g} after it" if seen["loss_scale"] is not None else ""
    lines = [
        f"loss {seen['loss']:.6f} over {seen['targets']:,.0f} targets, gradient norm {seen['grad_norm']:.6f} "
        f"({clipped}), learning rate {seen['lr']:.4g}{scale}"
        f"{'; SKIPPED: nothing was updated' if seen['skipped'] else ''}",
        "",
        f"{'layer':<28}{'gradient':>11}{'update':>11}{'of weights':>12}{'largest out':>13}",
        *(
            f"{layer['name']:<28}{layer['gradient']:>11.4g}{layer['update']:>11.4g}{layer['ratio']:>12.2e}"
            f"{_short(layer['activation']):>13}"
            for layer in seen["layers"]
        ),
    ]
    for title in ("worst", "best"):
        lines += ["", f"{title} samples:"] if seen[title] else []
        for sample in seen[title]:
            about = f"at {sample['position']} (sample {sample['number']:,})"
            lines.append(f"  {sample['loss']:8.4f}  {about:<24} {printable(sample['text'][:LONGEST])}")
    return lines


def _short(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}"


def _or_dash(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _apart(row: Shown) -> str:
    if row["same"] is None:
        return "–"
    return "same bits" if row["same"] else f"{row['loss'] - row['recorded_loss']:+.2e}"


def _store(options: Namespace) -> int:
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
