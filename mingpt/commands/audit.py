"""`mingpt audit RUN`: compute past intervals of a run again, and say whether each was computed right.

From each kept snapshot up to the next one, which must come out with the same digest. Where it does not, the trace says
which step first has other bits, and the account, which machine computed it. The run is only read; one process is
enough. Exit codes: 0 all is right; 1 something is wrong; 64 this machine can't tell, or there is nothing to audit.
"""

import argparse
from dataclasses import asdict

from mingpt.command import Unfit
from mingpt.console import complain, say, say_json
from mingpt.errors import FINISHED, UserError
from mingpt.history.history import History
from mingpt.redact import as_lines
from mingpt.report.auditing import Interval, audit, chosen, intervals
from mingpt.train.replaying import replay

SHOWN = 5  # tensors of an interval; --json has all


def audit_command(options: argparse.Namespace) -> int:
    if options.sample is not None and options.sample < 1:
        raise UserError(f"--sample {options.sample}: give how many intervals, at least 1")
    past = History.open(options.url, options.attempt, options.snapshots)
    which = chosen(intervals(past), options.sample, options.seed, options.first, options.last)
    if not which:
        raise UserError(
            f"{past.url}: no interval between kept snapshots lies there: look at `mingpt snapshots list`, and give "
            f"--snapshots if the run has set snapshot.dir"
        )
    found = []
    with replay(past, which[0][0] + 1, options.overrides) as run:
        for interval in audit(run, which):
            found.append(interval)
            if not options.json:
                say(as_text(interval))
    if options.json:
        say_json({"run": past.url, "notes": run.notes, "intervals": [asdict(interval) for interval in found]})
    return conclude(found, run.notes, options.json)


def as_text(found: Interval) -> str:
    begin = "config and seed" if found.begin == 0 else f"step {found.begin}"
    head = f"{found.verdict:<8}{begin} to {found.end}"
    if found.verdict == "ok":
        return f"{head}: digest {found.digest[:16]}, {found.traced} of {found.end - found.begin} steps as recorded"
    lines = [f"{head}: {found.why}"]
    if found.attempt is not None:
        lines.append(f"        computed by attempt {found.attempt}: {found.machine}")
    lines += [f"        {line}" for line in found.tensors[:SHOWN]]
    if (more := len(found.tensors) - SHOWN) > 0:
        lines.append(f"        and {more} other tensors")
    return as_lines(lines)


def conclude(found: list[Interval], notes: list[str], quiet: bool = False) -> int:
    """Print the summary. Raises Unfit if something is wrong, UserError if a difference proves nothing."""
    for note in notes:
        complain(note)
    if not found:
        raise UserError("nothing was audited: the run has meanwhile deleted its snapshots: audit it again")
    steps = sum(interval.end - interval.begin for interval in found)
    summary = f"{len(found)} intervals, {steps} steps"
    wrong = [interval for interval in found if interval.verdict == "FAIL"]
    if wrong:
        first = next((w for w in wrong if w.step is not None), wrong[0])
        who = f" by attempt {first.attempt}" if first.attempt is not None else ""
        raise Unfit(f"{summary}: {len(wrong)} wrong, the first up to step {first.step or first.end}{who}")
    if unproven := [interval for interval in found if interval.verdict != "ok"]:
        raise UserError(
            f"{summary}: {len(unproven)} differ, which proves nothing, since this machine is not like the one that "
            f"computed them: audit on one like it"
        )
    if not quiet:
        say(f"{summary}: all right")
    return FINISHED
