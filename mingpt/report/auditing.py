"""Compute a run's intervals again, from each kept snapshot to the next, and find where another result came from.

A snapshot's digest covers all of its state, and the trace has each step's loss and gradient norm. So the digest says
whether an interval was computed right, and the trace, in which of its steps it first was not. The run is only read.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from mingpt.errors import Damaged, OtherFormat, Unreadable, UserError
from mingpt.history.history import History
from mingpt.report.parting import differing, measured
from mingpt.snapshot.format import Manifest, State, TensorInfo, digest_of, encode_part, lay_out
from mingpt.snapshot.reader import read, read_manifest, verify
from mingpt.train.replaying import Again, Replay

OK, FAIL, UNPROVEN = "ok", "FAIL", "differs"


@dataclass
class Interval:
    """The steps after the snapshot of `begin` (0: config and seed) up to that of `end`.

    traced: steps that were compared with the trace. step, attempt: the first one with other bits, or the last one, and
    who computed it. why: what is wrong. tensors: those of the last snapshot that differ, one line each.
    """

    begin: int
    end: int
    verdict: str = OK
    digest: str = ""
    traced: int = 0
    step: int | None = None
    attempt: int | None = None
    machine: str = ""
    why: str = ""
    tensors: list[str] = field(default_factory=list)


def intervals(past: History) -> list[tuple[int, int]]:
    """From each kept snapshot of the run's line to the next; the first from step 0, where that is possible."""
    kept = [step for step in past.steps if past.manifest(step) is None or past.is_on_line(step)]
    first = past.stretches[0]
    begin = [0] if first.first == 1 and past.claims[first.attempt].parent == 0 else []
    return list(pairwise(begin + kept))


def chosen(
    found: list[tuple[int, int]], sample: int | None, seed: int, first: int | None, last: int | None
) -> list[tuple[int, int]]:
    """Those that have steps from `first` to `last`; or `sample` of them, by a seed."""
    found = [(a, b) for a, b in found if (first is None or b >= first) and (last is None or a < last)]
    return found if sample is None else sorted(random.Random(seed).sample(found, min(sample, len(found))))


def audit(run: Replay, which: list[tuple[int, int]]) -> Iterator[Interval]:
    """Compute these intervals again."""
    machines = {a.attempt: f"{a.world_size} process{'es' * (a.world_size > 1)}, the first on {a.host} ({a.device})"
                for a in run.past.accounts}  # fmt: skip
    for begin, end in which:
        found, damage = Interval(begin, end), None
        try:
            _audit(run, found)
        except Damaged as error:
            damage = error
        if found.verdict != OK or damage:
            if not {begin, end} - {0} <= {*run.past.store.steps()}:  # it is being trained, or rewound
                run.notes.append(f"step {begin} to {end}: not audited, since the run no longer has a snapshot of it")
                continue
            if damage:
                raise UserError(f"{run.past.url}: step {begin} to {end}: {damage}: audit it again") from damage
        if found.verdict != OK and found.attempt is not None:
            found.machine = machines.get(found.attempt, "a machine that is not known: its account is missing")
        yield found


def _audit(run: Replay, found: Interval) -> None:
    for step in (found.begin, found.end):
        if step and (problem := _damage(run.past, step)):
            found.verdict, found.why = FAIL, f"the snapshot of step {step} is damaged: {problem}"
            manifest = run.past.manifest(step)
            found.attempt = manifest.attempt if manifest else None
            return
    run.begin_at(found.begin)
    steps = [run.advance() for _ in range(found.begin, found.end)]
    found.traced = sum(again.recorded is not None for again in steps)
    manifest, ours = read_manifest(run.past.store, found.end), _infos(run.save().state)
    theirs = manifest.tensors
    found.digest = digest_of(ours)
    wrong = next((again for again in steps if again.same is False), None)
    equal = found.digest == digest_of(theirs)
    if equal and wrong is None:
        return
    found.verdict = UNPROVEN if run.unlike & {again.attempt for again in steps} else FAIL
    found.step, found.attempt = (wrong.step, wrong.attempt) if wrong else (found.end, manifest.attempt)
    if not equal:
        found.tensors = _tensors(run, manifest, ours, theirs)
    if wrong:
        found.why = _first(wrong, found, equal)
    else:
        proven = max((again.step for again in steps if again.same), default=None)
        found.why = _after_the_trace(found, proven)


def _damage(past: History, step: int) -> str:
    try:
        verify(past.store, step)
    except (Damaged, Unreadable, OtherFormat) as error:
        return str(error)
    return ""


def _infos(state: State) -> dict[str, TensorInfo]:
    parts = (encode_part(part, state[part.kind]) for part in lay_out(state))
    return {name: info for part in parts for name, info in part.tensors.items()}


def _first(wrong: Again, found: Interval, equal: bool) -> str:
    """What the first step with other bits tells."""
    if equal:
        right = f"the state after step {found.end} is right: the trace was changed"
        return f"step {wrong.step} has {wrong.bits()}, but {right}"
    before = f", or in one from {found.begin + 1} on whose bits did not show it" if wrong.step > found.begin + 1 else ""
    snapshot = f", or the snapshot of step {found.begin} is not the state that the run had" if found.begin else ""
    return f"step {wrong.step} is the first with other bits ({wrong.bits()}): it went wrong there{before}{snapshot}"


def _after_the_trace(found: Interval, proven: int | None) -> str:
    """Each recorded step has the right bits, and the snapshot has not."""
    if proven is None:
        return f"the state after step {found.end} is another one, and no step was recorded that could say since when"
    return (
        f"the steps have the right bits up to {proven}, and the state after step {found.end} is another one: if the "
        f"next interval is right, the run went on from it, and it went wrong by so little that no step showed it; "
        f"otherwise the snapshot was written wrong, or was changed later"
    )


def _tensors(run: Replay, manifest: Manifest, ours: dict[str, TensorInfo], theirs: dict[str, TensorInfo]) -> list[str]:
    states = read(run.past.store, manifest.step).state, run.save().state
    stored, again = (state["model"] | state["optimizer"] for state in states)
    lines = []
    for name in differing(ours, theirs):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            lines.append(f"{name}: of another form, or only in one of the two")
            continue
        d = measured(name, a.dtype, again[name].cpu(), stored[name])
        at = f", the furthest at {d.at[0]}: {d.at[1]}, in the run {d.at[2]}" if d.at else ""
        lines.append(f"{name}: {d.differ:,} of {d.values:,} values differ{at}")
    return lines
