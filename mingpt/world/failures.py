"""What went wrong, in one line for people, and whether trying again can help."""

import re
from dataclasses import dataclass

import torch

from mingpt.errors import CRASHED, USER_ERROR, Damaged, SnapshotFailed, TransientError, UserError
from mingpt.redact import without_secrets
from mingpt.world.lifetime import Phase

LOST_PEER = "lost contact with another process"  # a victim's words: the cause is in somebody else's

# torch's allocator, and what it says of sizes that no machine could have.
NO_MEMORY = ("can't allocate memory", "Storage size calculation overflowed")


@dataclass(frozen=True)
class Failure:
    """A reason, the exit code that it asks for, and whether a stack trace helps to find the cause."""

    reason: str
    code: int
    trace: bool


def explain(error: BaseException, phase: Phase) -> Failure:
    """Sort an error by what the reader has to do. `phase` is how far this process has come."""
    text = str(error).strip()
    first_line = str(without_secrets(text.splitlines()[0])) if text else ""
    first_line = re.sub(r"^\[[^]]*\] ", "", first_line).partition(". This is typically")[
        0
    ]  # gloo's source line and guess
    if isinstance(error, UserError):
        return Failure(str(error), USER_ERROR, False)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(words in text for words in NO_MEMORY):
        cure = "lower batch.micro_size, model.block_size or the model's size"
        if phase < Phase.TRAINING:  # it would be so again
            return Failure(f"out of memory in the first step: {cure} ({first_line})", USER_ERROR, False)
        return Failure(f"out of memory: if it happens again, {cure} ({first_line})", CRASHED, False)
    if "DataLoader worker" in text:
        cure = "if it happens again, look for the system's out-of-memory killer and lower data.workers"
        return Failure(f"a data loader process died: {cure} ({first_line})", CRASHED, False)
    if isinstance(error, (TimeoutError, TransientError, SnapshotFailed, Damaged)):  # ours, and told in full
        return Failure(text, CRASHED, False)
    if isinstance(error, RuntimeError):  # as torch.distributed reports whatever happens to the others
        if "timed out" in text.lower() or "timeout" in text.lower():
            what = "another process has not answered for world.timeout_seconds: look for the one whose log ends earlier"
            return Failure(f"{what} ({first_line})", CRASHED, False)
        if any(words in text for words in ("by peer", "connectFullMesh", "Broken pipe", "remote process exited")):
            return Failure(f"{LOST_PEER} ({first_line})", CRASHED, False)
    return Failure(": ".join(filter(None, (type(error).__name__, first_line))), CRASHED, True)
