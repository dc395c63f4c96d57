"""What a report says about equal bits: from the snapshots' history, and from the trace."""

from collections.abc import Sequence
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


def twice(attempts: Sequence[Records], dropped: bool) -> str:
    """Whether steps that several attempts have computed have the same bits. attempts: traces, oldest first."""
    if not attempts:
        return ""
    every = np.concatenate(attempts)
    every = every[np.argsort(every["step"], kind="stable")]
    again = every["step"][1:] == every["step"][:-1]
    if not again.any():
        return "No step of the trace was computed twice."
    text = f"Steps computed twice: {again.sum():,}"
    raw = np.ascontiguousarray(every).view(np.uint8).reshape(len(every), -1)
    differs = again & (raw[1:] != raw[:-1]).any(1)
    if not differs.any():
        return f"{text}, all with the same bits of loss and gradient norm."
    why = "; a rollback left out batches, so they may" if dropped else ""
    first = every["step"][1:][differs][0]
    return f"{text}, of which {differs.sum():,} have other bits, the first of them step {first:,}{why}."
