"""Forks among the runs of a report: whose they are, and curves that leave their parent's."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mingpt.report.reading import Curve, Run


def forked_from(run: Run, runs: Sequence[Run]) -> Run | None:
    """The one among several runs that a run was forked from."""
    parent = run.parent
    if parent is None or parent.claim is None:
        return None
    claim = parent.attempt, parent.claim
    return next((r for r in runs if r is not run and claim in ((n, c.id) for n, c in r.claims.items())), None)


def joined(runs: Sequence[Run]) -> list[Run]:
    """The runs, with the curve of each fork drawn from where it left its parent, if that is among them."""

    def from_parent(run: Run, curve: Curve, parents: Curve) -> Curve:
        assert run.parent
        before = parents.steps <= run.parent.step
        at = (
            np.append(old[before][-1:], new)
            for old, new in ((parents.steps, curve.steps), (parents.values, curve.values))
        )
        return Curve(*at) if len(curve.steps) else curve

    found = []
    for run in runs:
        if parent := forked_from(run, runs):
            run = replace(
                run,
                loss=from_parent(run, run.loss, parent.loss),
                grad_norm=from_parent(run, run.grad_norm, parent.grad_norm),
            )
        found.append(run)
    return found
