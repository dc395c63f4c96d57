"""The step in which two runs part, executed for both on this machine: what differs first in it, and what the cause is.

Each side begins at its own nearest snapshot; of the steps that both then execute, the first in which anything differs
is told, and if only its update does, the step that the trace shows, too. A step is kept as hashes of its bits: 32 bytes
for each name, so it takes no more memory than the step itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mingpt.errors import UserError
from mingpt.history.history import History
from mingpt.report.parting import Parting
from mingpt.train.bench import Bench
from mingpt.train.closeup import Hashes, look
from mingpt.train.replaying import Again, Replay, replay

Executable = tuple[History, Sequence[str]]  # one of the two, and what is so on this machine


@dataclass(frozen=True)
class First:
    """The first that differs. differ, of: how many do, of how many. only: "A" or "B" if the other has none such."""

    name: str
    differ: int
    of: int
    only: str = ""


@dataclass(frozen=True)
class Parted:
    """One step."""

    step: int
    samples: First | None
    outputs: First | None
    gradients: First | None
    state: First | None

    @property
    def differs(self) -> bool:
        return any((self.samples, self.outputs, self.gradients, self.state))


@dataclass
class Executed:
    """step: the last one that was executed. begin: from which snapshot each side was computed, 0: config and seed.

    before: of the state before the first step that both executed. first_other: the first step in which a side's bits
    are not those that it recorded. same: whether all of its steps have the bits that it recorded; None: it has none.
    """

    step: int
    begin: list[int] = field(default_factory=list)
    before: First | None = None
    steps: list[Parted] = field(default_factory=list)
    same: list[bool | None] = field(default_factory=list)
    first_other: list[int | None] = field(default_factory=list)
    notes: list[list[str]] = field(default_factory=list)


class Imprint:
    """A step as hashes. samples: by position in the batch. outputs: by module. gradients: in the order of backward.

    state: after the step.
    """

    def __init__(self, run: Replay) -> None:
        """Do the next step of `run`, which is prepared."""
        bench, samples, gradients = run.bench, Hashes(), Hashes()
        numbers, batch = bench.context.plan.sample_ids(run.step).tolist(), bench.microbatches(run.step)
        rows = (row for microbatch in batch for row in zip(*microbatch, strict=True))
        for position, (number, row) in enumerate(zip(numbers, rows, strict=True)):
            for tensor in row:
                samples.add(f"position {position} (sample {number:,})", tensor)
        self.outputs = {name: output.bits for name, output in look(bench, run.step)[1].items()}
        self.again: Again = run.advance()
        for name, parameter in reversed([*bench.context.model.named_parameters()]):
            if parameter.requires_grad:
                gradients.add(name, bench.gradient(name))
        self.samples, self.gradients, self.state = samples.read(), gradients.read(), state_of(bench)


def state_of(bench: Bench) -> dict[str, str]:
    found = Hashes()
    for tensors in bench.state().values():
        for name in sorted(tensors):
            found.add(name, tensors[name])
    return found.read()


class _Side:
    """What came out of one of the two up to a step. state: before its first step."""

    def __init__(self, name: str, side: Executable, step: int) -> None:
        past, here = side
        self.steps = dict[int, Imprint]()
        try:
            with replay(past, step, here) as run:
                run.prepare()
                self.begin, self.notes, self.state = run.base, run.notes, state_of(run.bench)
                while run.step < step:
                    run.prepare()
                    _check_code(run)
                    found = Imprint(run)
                    self.steps[run.step] = found
        except UserError as error:
            raise UserError(*(f"{name}: {problem}" for problem in error.problems)) from error
        self.same = {n: i.again.same for n, i in self.steps.items() if i.again.same is not None}

    def state_after(self, step: int) -> Mapping[str, str]:
        return self.steps[step].state if step > self.begin else self.state


def executed(parting: Parting, a: Executable, b: Executable) -> Executed | None:
    """None if no step and no snapshot differs. Raises UserError if this checkout can't execute the step for both."""
    step = _which(parting, a, b)
    if step is None:
        return None
    sides = [_Side("A", a, step), _Side("B", b, step)]
    start = max(side.begin for side in sides)
    found = Executed(
        step,
        begin=[side.begin for side in sides],
        before=first(*(side.state_after(start) for side in sides)),
        same=[all(side.same.values()) if side.same else None for side in sides],
        first_other=[next((n for n, same in side.same.items() if not same), None) for side in sides],
        notes=[side.notes for side in sides],
    )
    parted = (_parted(n, *(side.steps[n] for side in sides)) for n in range(start + 1, step + 1))
    if one := next((p for p in parted if p.differs), None):
        shown = one.outputs or one.gradients or one.step == step
        found.steps = [one] if shown else [one, _parted(step, *(side.steps[step] for side in sides))]
    return found


def _which(parting: Parting, *sides: Executable) -> int | None:
    """The step that the trace shows; or the one after the first snapshot that differs, or the one that leads to it."""
    if parting.step is not None:
        return parting.step
    if parting.snapshot is None:
        return None
    step, other = parting.snapshot
    if step != other:
        raise UserError(
            f"--replay: these are the snapshots of two steps, {step} and {other}, and both runs have computed the same "
            f"ones, as far as their traces tell: name the same step of both, or leave --replay out"
        )
    try:
        for past, _ in sides:
            past.check_step(step + 1)
    except UserError:  # it is the last
        return step
    return step + 1


def _check_code(run: Replay) -> None:
    number, theirs, ours = run.stretch.attempt, run.stretch.numerics, run.numerics
    if theirs.get("mingpt", ours["mingpt"]) != ours["mingpt"]:
        raise UserError(
            f"attempt {number} was computed by version {theirs['mingpt']} of mingpt's numerics, and this checkout has "
            f"version {ours['mingpt']}: run this in a checkout of mingpt whose NUMERICS is {theirs['mingpt']}"
        )
    if any(theirs.get(key, ours[key]) != ours[key] for key in ("code", "own")):
        raise UserError(f"the user's own code in attempt {number} is another one here: check out the run's code")


def first(a: Mapping[str, str], b: Mapping[str, str]) -> First | None:
    """The first name with another hash, in A's order; then those that B alone has."""
    names = [*a, *(name for name in b if name not in a)]
    other = [name for name in names if a.get(name) != b.get(name)]
    if not other:
        return None
    name = other[0]
    return First(name, len(other), len(names), "A" if name not in b else "B" if name not in a else "")


def _parted(step: int, a: Imprint, b: Imprint) -> Parted:
    return Parted(
        step,
        first(a.samples, b.samples),
        first(a.outputs, b.outputs),
        first(a.gradients, b.gradients),
        first(a.state, b.state),
    )


def lines(found: Executed | None) -> list[str]:
    if found is None:
        return ["replay: none, since no step and no snapshot differs"]
    start = max(found.begin)
    which = f"step {found.step:,}" if start + 1 == found.step else f"steps {start + 1:,} to {found.step:,}"
    begin = [f"step {n:,}'s snapshot" if n else "config and seed" for n in found.begin]
    out = [f"replay: {which}, from {begin[0] if begin[0] == begin[1] else f'{begin[0]} of A and {begin[1]} of B'}"]
    if found.before:
        out.append(f"  the state before it differs: {_named(found.before, 'tensors')}")
    out += [f"  step {p.step:,}: {_step(p)}" for p in found.steps]
    others = [f"{name} recorded other bits in step {n:,}" for name, n in zip("AB", found.first_other, strict=True) if n]
    if not found.before and not found.steps:
        blame = f"; {' and '.join(others)}: its machine computed otherwise" if others else ""
        out.append(f"  both come out alike on this machine{blame}")
    else:
        out += [f"  {text} than come out on this machine" for text in others]
    return out + [f"  {name}: {note}" for name, notes in zip("AB", found.notes, strict=True) for note in notes]


def _step(p: Parted) -> str:
    samples = f"{_named(p.samples, 'samples')} differ" if p.samples else "the same samples"
    if not p.outputs and not p.gradients:
        if not p.state:
            return f"{samples}, outputs, gradients and update"
        return f"{samples}, outputs and gradients; its update makes the difference: {_named(p.state, 'tensors')}"
    told = [samples, "the same outputs"]
    if p.outputs:
        told[1] = f"the first output that differs is that of {_place(p.outputs, 'modules')}"
    if p.gradients:
        told.append(f"the first gradient, in the order of backward, that of {_place(p.gradients, 'parameters')}")
    return "; ".join(told)


def _named(one: First, what: str) -> str:
    return f"{one.differ:,} of {one.of:,} {what}, the first is {one.name}{_only(one)}"


def _place(one: First, what: str) -> str:
    return f"{one.name} ({one.differ:,} of {one.of:,} {what}){_only(one)}"


def _only(one: First) -> str:
    return f", which {one.only} alone has" if one.only else ""
