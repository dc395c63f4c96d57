"""`mingpt diff A B`: where two runs parted: settings, data, code, machine, the first other step and tensor.

A and B are runs' directories, or RUN@STEP for one snapshot; any fsspec URL. With --attempts, two attempts of one run.
Nothing in the runs is changed.
"""

import argparse
from dataclasses import asdict
from typing import Any

from mingpt.cli.command import UNFIT
from mingpt.cli.console import as_lines, say, say_json, shortened
from mingpt.errors import FINISHED, UserError
from mingpt.report.parting import Parting, TensorDifference, parting, side
from mingpt.snapshot.reader import split_url

LONGEST = 100  # characters of a value


def diff_command(options: argparse.Namespace) -> int:
    if (options.b is None) == (options.attempts is None):
        raise UserError("give two runs, or one and --attempts with the numbers of two attempts of it")
    if options.attempts:
        sides = [side(options.a, attempt=number) for number in options.attempts]
    else:
        sides = [side(*split_url(url)) for url in (options.a, options.b)]
    found = parting(*sides)
    if options.json:
        say_json(asdict(found) | {"differs": found.differs})
    else:
        say(as_lines(_lines(found)))
    return UNFIT if options.exit_code and found.differs else FINISHED


def _lines(found: Parting) -> list[str]:
    lines = [f"A: {found.a}", f"B: {found.b}"]
    if fork := found.forked:
        which = "A" if found.fork == found.a else "B"
        lines.append(f"{which} was forked from the other after step {fork.step:,}")
    lines += _settings(found)
    lines += _numerics(found)
    if found.step is not None:
        lines.append(f"steps: {found.steps:,} are in both traces; the first with other bits is step {found.step:,}:")
        lines += [f"  {name}: {a!r} -> {b!r}" for name, (a, b) in found.bits.items() if a != b or a != a]
    elif found.steps:
        lines.append(f"steps: {found.steps:,} are in both traces, all with the same bits of loss and gradient norm")
    else:
        lines.append("steps: none is in both traces")
    return lines + _snapshots(found)


def _settings(found: Parting) -> list[str]:
    if not found.settings_known:
        return ["config: not known, since there is no snapshot of one of them"]
    which = f"{len(found.config)} that affect the result differ" if found.config else "what affects the result is equal"
    lines = [f"config: {which}", *(f"  {key}: {_shown(a)} -> {_shown(b)}" for key, (a, b) in found.config.items())]
    others = [f"{key}: {_shown(a)} -> {_shown(b)}" for key, (a, b) in found.others.items()]
    return [*lines, *(f"  without effect on the result: {line}" for line in others)]


def _numerics(found: Parting) -> list[str]:
    if not found.numerics_known:
        return ["data, code, machine: not known, since no snapshot tells"]
    a, b = ((text or "not recorded")[:16] for text in found.data)
    same = found.data[0] == found.data[1]
    lines = [f"data: the same (sha256 {a})" if same else f"data: other content (sha256 {a} -> {b})"]
    for name, different in (("code", found.code), ("machine and kernels", found.numerics)):
        lines.append(f"{name}: {'different' if different else 'the same'}")
        lines += [f"  {line}" for line in different]
    return lines


def _snapshots(found: Parting) -> list[str]:
    if not found.common:
        return ["snapshots: none of the same step in both"]
    if found.snapshot is None:
        return [f"snapshots: {found.common} in both, all equal, the last of step {found.equal:,}"]
    a, b = found.snapshot
    which = f"step {a:,}" if a == b else f"step {a:,} of A and {b:,} of B"
    equal = "" if found.equal is None else f"; that of step {found.equal:,} is equal"
    assert found.tensor
    many, of = found.tensors
    rest = (
        [f"  and {many - 1:,} others of {of:,} tensors"] if many > 1 else [f"  the other {of - 1:,} tensors are equal"]
    )
    return [
        f"snapshots: {found.common} in both, the first that differs is {which}{equal}",
        _tensor(found.tensor),
        *rest,
    ]


def _tensor(t: TensorDifference) -> str:
    if t.differ is None:
        return f"  {t.name}: {t.why}"
    text = f"  {t.name} ({t.dtype}): {t.differ:,} of {t.values:,} values differ"
    if t.at is None:
        return text
    place, a, b = t.at
    return f"{text}, the furthest at {place}: {a} -> {b}"


def _shown(value: Any) -> str:
    return shortened(str(value), LONGEST)
