"""`mingpt log DIR`: the runs in a folder, their attempts and snapshots; with --graph each fork below its parent.

DIR is a folder of runs, or one run's directory; any fsspec URL. Nothing in it is changed.
"""

import argparse
from dataclasses import asdict, dataclass, field
from typing import Any

from mingpt.cli.console import as_lines, counted, say, say_json
from mingpt.errors import UserError
from mingpt.history.history import NOTHING
from mingpt.observe.ledger import Account
from mingpt.report.reading import GONE_BACK, Run
from mingpt.report.runs import Row, listed, runs_of, table

STEPS_SHOWN = 5  # of what an attempt has set aside


@dataclass
class Node:
    """A line of the tree. about: the same as JSON."""

    text: str
    about: dict[str, Any] = field(default_factory=dict)
    below: list["Node"] = field(default_factory=list)


def log_command(options: argparse.Namespace) -> int:
    found, runs = _runs(options.url)
    nodes = {run: _of_run(run) for run in runs}
    if options.json:
        say_json([node.about for node in nodes.values()])
        return 0
    if found and not options.graph:
        say(f"{table(found)}\n")
    parents = {
        run: other
        for run in runs
        for other in reversed(runs)
        if options.graph and run is not other and run.past.is_fork_of(other.past)
    }
    reached = [run for run in runs if run not in parents]
    for parent in reached:  # it grows: a fork of a fork comes with the fork
        for run in runs:
            if parents.get(run) is parent:
                _attempt_of(nodes[parent], run).below.append(nodes[run])
                reached.append(run)
    # Runs that name each other as parents are no tree, and stand alone.
    for run, node in nodes.items():
        if run not in parents or run not in reached:
            say(as_lines(_lines(node, options.graph)))
    return 0


def _runs(url: str) -> tuple[list[Row], list[Run]]:
    """The rows and the runs of a folder; of one that is a run itself no rows. Raises UserError if there is none."""
    try:
        return [], [Run(url)]
    except UserError as none:
        found = listed(url)
        if runs := runs_of(found):
            return found, runs
        if NOTHING not in str(none):
            raise
        raise UserError(f"{url}: neither a run nor a folder of runs: check the spelling") from none


def _of_run(run: Run) -> Node:
    there, aside = [*run.past.manifests.values()], run.past.set_aside()
    text = f"{run.name} ({run.past.folder}): step {run.last_step:,}, {counted(run.starts, 'attempt')}"
    if parent := run.past.parent:
        text += f"; forked from {parent.run} after step {parent.step:,}"
        text += f", with other {', '.join(parent.keys)}" if parent.keys else ""
    text += f"; on {run.disk}'s disk alone" if run.disk else ""
    attempts = [_of_attempt(run, a, there, aside) for a in run.attempts]
    known = {a.attempt for a in run.attempts}
    first = [_of_snapshot(m) for m in there if m.attempt not in known]
    about = {
        "run": run.name,
        "dir": run.past.folder,
        "step": run.last_step,
        "disk": run.disk,
        "parent": asdict(parent) if parent else None,
        "snapshots": [node.about for node in first],
        "attempts": [node.about for node in attempts],
        "damaged": run.past.damaged,
    }
    return Node(text, about, [*map(Node, run.past.damaged), *first, *attempts])


def _of_snapshot(manifest: Any) -> Node:
    metrics = manifest.metrics
    losses = [(name, value) for name, value in (("loss", metrics.loss), ("validation loss", metrics.val_loss)) if value]
    text = f"step {manifest.step:,}: {manifest.digest[:16]}" + "".join(f", {n} {v:.4f}" for n, v in losses)
    return Node(text, {"step": manifest.step, "digest": manifest.digest, "loss": metrics.loss,
                       "val_loss": metrics.val_loss})  # fmt: skip


def _of_attempt(run: Run, account: Account, there: list[Any], aside: list[Any]) -> Node:
    number, start = account.attempt, account.from_step
    kept = run.kept[number]
    steps = sorted(m.step for m in aside if m.attempt == number)
    snapshots = [_of_snapshot(m) for m in there if m.attempt == number]
    damage = run.past.trace_damage.get(number)
    about = {"attempt": number, "from_step": start, "kept": kept, "processes": account.world_size,
             "device": account.device, "end": account.end, "set_aside": steps,
             "trace_damage": damage,
             "snapshots": [node.about for node in snapshots]}  # fmt: skip
    if account.end in GONE_BACK:
        what = f"rewind to step {start:,}" if account.end == "rewind" else f"rewind undone: back to step {start:,}"
        return Node(what, about, snapshots)
    which = f"steps {start + 1:,} to {kept:,}" if kept > start else f"none of its steps, from {start:,}"
    text = ", ".join(part for part in (f"attempt {number}: {which}", account.processes, account.end, damage) if part)
    if steps:
        more = ", …" if len(steps) > STEPS_SHOWN else ""
        text += f"; set aside: {', '.join(f'{step:,}' for step in steps[:STEPS_SHOWN])}{more}"
    return Node(text, about, snapshots)


def _attempt_of(parent: Node, fork: Run) -> Node:
    """The attempt that a fork left, or else the run."""
    assert fork.past.parent
    return next((node for node in parent.below if node.about.get("attempt") == fork.past.parent.attempt), parent)


def _lines(node: Node, tree: bool) -> list[str]:
    """A node's own line, and those below it: indented, or as the branches of a tree."""
    lines = [node.text]
    for i, below in enumerate(node.below, 1):
        first = rest = "  "
        if tree:
            first, rest = ("└─ ", "   ") if i == len(node.below) else ("├─ ", "│  ")
        inner = _lines(below, tree)
        lines += [f"{first}{inner[0]}", *(f"{rest}{line}" for line in inner[1:])]
    return lines
