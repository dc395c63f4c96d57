"""What a report says about equal bits: from the snapshots' history, and from the trace."""

from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np

from mingpt.compute.numerics import changes
from mingpt.observe.trace import Records
from mingpt.snapshot.format import Manifest


def equality(manifest: Manifest | None) -> list[str]:
    """From which steps the bits are no longer those of a run that was never interrupted, as its snapshots say."""
    if manifest is None:
        return ["No snapshot tells what the bits depend on."]
    lines = []
    for before, after in pairwise(manifest.history):
        old, new = (n if isinstance(n := past.get("numerics"), dict) else {} for past in (before, after))
        different = changes(old, new)[0]
        if isinstance(settings := after.get("changes"), dict):
            different += [f"{key}: {value}" for key, value in settings.items()]
        if different:
            which = f"step {after.get('from_step')} (attempt {after.get('attempt')})"
            lines.append(f"Equality ends after {which}: {', '.join(different)}")
    batch, exact = manifest.config.get("batch"), manifest.fingerprint.get("reduce") == "exact"
    if not exact or not isinstance(batch, dict) or batch.get("per_process_size"):
        lines.append("reduce=fast or batch.per_process_size: other numbers of processes need not give equal bits.")
    return lines or [
        f"Config and numerics stayed the same in all attempts that led to step {manifest.step:,} "
        f"({len(manifest.history)}): its bits are those of a run that was never interrupted."
    ]


def twice(traces: Mapping[int, Records], names: Mapping[int, str | None]) -> str:
    """Whether steps that several attempts have computed have the same bits. By attempt.

    names: of what an attempt's bits follow from. Attempts with the same name are compared; None: with no other.
    """
    total, compared, different = _again(traces.values()), 0, list[int]()
    for name in {names.get(attempt) for attempt in traces} - {None}:
        every = np.concatenate([trace for attempt, trace in traces.items() if names.get(attempt) == name])
        every = every[np.argsort(every["step"], kind="stable")]
        again = every["step"][1:] == every["step"][:-1]
        raw = np.ascontiguousarray(every).view(np.uint8).reshape(len(every), -1)
        differs = again & (raw[1:] != raw[:-1]).any(1)
        compared += int(again.sum())
        different += every["step"][1:][differs].tolist()
    if not total:
        return "No step of the trace was computed twice." if traces else ""
    if not compared:
        return (
            f"Steps computed twice: {total:,} in attempts whose bits may differ (other settings, machines or batches)."
        )
    text = f"Steps computed twice: {compared:,}"
    if not different:
        return f"{text}, all with the same bits of loss and gradient norm."
    return f"{text}, of which {len(different):,} have other bits, the first of them step {min(different):,}."


def _again(traces: Iterable[Records]) -> int:
    """How many records are of a step that another one has, too, not counting the first of each."""
    steps = np.concatenate([np.empty(0, np.uint32), *(trace["step"] for trace in traces)])
    return len(steps) - len(np.unique(steps))
