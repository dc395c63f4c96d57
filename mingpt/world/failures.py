"""Turns an exception into a one-line reason and an exit code."""

import re
from dataclasses import dataclass

import torch

from mingpt.config.schema import Config
from mingpt.errors import CRASHED, USER_ERROR, Damaged, SnapshotFailed, TransientError, UserError
from mingpt.world.lifetime import Phase

LOST_PEER = "lost contact with another process"  # a consequence: the cause is in another process's log
NO_ANSWER = "another process has not answered for world.timeout_seconds: look for the one whose log ends earlier"

# Messages of torch's allocator (the second is for sizes that overflow an integer), and of what takes memory of a GPU
# beside it: NCCL and kernels ("out of memory"), cuBLAS, cuDNN.
NO_MEMORY = ("can't allocate memory", "Storage size calculation overflowed", "out of memory", "_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Failure:
    """What `classify` makes of an exception."""

    reason: str  # one line, with what to do
    code: int  # to exit with
    trace: bool  # whether to print a stack trace, too: not for errors whose reason says all


def classify(error: BaseException, phase: Phase, config: Config | None = None) -> Failure:
    """The reason to print and the exit code to end with. phase: how far this process had come."""
    text = str(error).strip()
    first_line = text.splitlines()[0] if text else ""
    # gloo begins with a source line in brackets, and ends with a guess at the cause.
    first_line = re.sub(r"^\[[^]]*\] ", "", first_line).partition(". This is typically")[0]
    if isinstance(error, UserError):
        return Failure(str(error), USER_ERROR, False)
    # Where torch has no class for it, only its text tells.
    no_memory = isinstance(error, RuntimeError) and any(words in text for words in NO_MEMORY)
    if no_memory or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        cure = f"lower {_smaller_batch(config) or 'batch.micro_size'}, model.block_size or the model's size"
        others = held_by_others()
        if others:
            # Nothing that the user could set: the launcher tries again when that process may be gone.
            where = f"{others / 2**30:.1f} GiB of this GPU are held by other processes: see nvidia-smi"
            return Failure(f"out of memory: {where} ({first_line})", CRASHED, False)
        if phase < Phase.TRAINING:  # a retry would run out of memory again
            return Failure(f"out of memory in the first step: {cure} ({first_line})", USER_ERROR, False)
        return Failure(f"out of memory: if it happens again, {cure} ({first_line})", CRASHED, False)
    # torch reports what happens to its loader's processes as a RuntimeError, or as the data's own type; the texts
    # differ.
    if "DataLoader worker (pid" in text:
        cure = "if it happens again, look for the system's out-of-memory killer and lower data.workers"
        return Failure(f"a data loader process died: {cure} ({first_line})", CRASHED, False)
    if "DataLoader timed out" in text:
        where = "within world.timeout_seconds: look for a stack trace above, else at the disk or network of the data"
        return Failure(f"no data loader process has given a microbatch {where} ({first_line})", CRASHED, False)
    if " in DataLoader worker process " in first_line or " in pin memory thread " in first_line:
        # The data's own error, of any type. torch has put its stack into its text.
        return Failure(f"{type(error).__name__}: {first_line}", CRASHED, True)
    if isinstance(error, (TimeoutError, TransientError, SnapshotFailed, Damaged)):  # our own, with complete messages
        return Failure(text, CRASHED, False)
    # torch.distributed raises it when another process fails. Both reasons are consequences, which launch/ending.py puts
    # behind the cause that another process has left.
    if isinstance(error, RuntimeError):
        if "timed out" in text.lower() or "timeout" in text.lower():
            return Failure(f"{NO_ANSWER} ({first_line})", CRASHED, False)
        if any(words in text for words in ("by peer", "connectFullMesh", "Broken pipe", "remote process exited")):
            return Failure(f"{LOST_PEER} ({first_line})", CRASHED, False)
    return Failure(": ".join(filter(None, (type(error).__name__, first_line))), CRASHED, True)


def held_by_others() -> int:
    """Bytes of this process's GPU that are neither free nor its own: a process killed a second ago may still have them.

    0 without a GPU, and for less than the 1 GiB that CUDA and NCCL themselves take beside torch's allocator.
    """
    if not torch.cuda.is_initialized():
        return 0
    # The driver's count is of all processes; torch's is of this one's allocator.
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved() - 2**30
    return max(others, 0)


def _smaller_batch(config: Config | None) -> str:
    """The next smaller batch.micro_size that divides the batch; empty if there is none."""
    if config is None or config.batch.micro_size == 1:
        return ""
    size = config.batch.micro_size
    samples = config.batch.per_process_size or config.batch.global_size
    fewer = max(n for n in range(1, size) if samples % n == 0)
    return f"batch.micro_size from {size} to {fewer} (a snapshot then needs resume.changed=true)"
