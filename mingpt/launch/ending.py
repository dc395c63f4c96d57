"""How a launch ended: the exit code and the reason, from what the workers left and what torchrun raised."""

import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from mingpt.cli.console import counted
from mingpt.errors import CRASHED, FINISHED, STOPPED, USER_ERROR
from mingpt.world.failures import LOST_PEER
from mingpt.world.lifetime import STOP_SIGNALS

LOST_CONTACT = (
    "lost contact with the node that hosts the rendezvous: it has ended, or sent nothing for world.timeout_seconds: "
    "look at that node and its log, then start the same command again"
)
NOT_BACK = (
    "not all nodes have come back within world.init_timeout_seconds: the reason is in the log of the one that has not; "
    "then start the same command again"
)


def no_contact(detail: str) -> str:
    return (
        f"no contact with the node that hosts the rendezvous, or not all nodes have come within "
        f"world.init_timeout_seconds: are all up, are the address and --rdzv-id right, is the port open? ({detail})"
    )


@dataclass(frozen=True)
class Ending:
    """Exit codes and reasons of this node's workers that failed in an attempt. The first is the likeliest cause."""

    codes: list[int]  # negative: the signal that has ended it
    reasons: list[str]  # of the same workers, each a line

    @classmethod
    def of(cls, failures: Iterable[ProcessFailure]) -> "Ending":
        """failures: as torch's agent reports them."""

        def order(failure: ProcessFailure) -> tuple[bool, bool, int]:
            code, local_rank = failure.exitcode, failure.local_rank
            # Consequences last: workers that lost a peer, and workers that the agent has asked to stop.
            return code != USER_ERROR, LOST_PEER in _reason(failure) or code in (STOPPED, -signal.SIGTERM), local_rank

        # Not by torchrun's rank: the processes may have given themselves others (world/joining.py).
        host = socket.gethostname()
        codes, reasons = list[int](), list[str]()
        for failure in sorted(failures, key=order):
            codes.append(failure.exitcode)
            reasons.append(f"process {failure.local_rank} of {host}: {_reason(failure)}")
        return cls(codes, reasons)

    def code(self, asked: bool = False) -> int:
        """The launch's exit code if no further attempt follows. asked: whether this agent was asked to stop."""
        if USER_ERROR in self.codes:
            return USER_ERROR
        # A stop signal kills a worker that has not installed its handlers yet. Such a worker has nothing to lose.
        early = {-number for number in STOP_SIGNALS}
        if self.codes and set(self.codes) <= {STOPPED} | early and (asked or STOPPED in self.codes):
            return STOPPED
        return CRASHED if self.codes else FINISHED


def _reason(failure: ProcessFailure) -> str:
    """The reason in the worker's error file (lifetime.leave_reason); without one, what its exit code means."""
    message = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    if isinstance(message, dict) and message.get("message"):
        return str(message["message"])
    if failure.exitcode == -signal.SIGKILL:
        return "killed (SIGKILL). If nobody did that, memory ran out: lower batch.micro_size or data.workers"
    if failure.exitcode < 0:
        return f"ended by {signal.Signals(-failure.exitcode).name}"
    return "stopped on request after a snapshot" if failure.exitcode == STOPPED else f"exit code {failure.exitcode}"


def verdict(ending: Ending | None, had_workers: bool, failed: BaseException | None, limit: int) -> tuple[int, str]:
    """The exit code of a launch, and the reason.

    ending: of the last attempt; None: no worker has failed. failed: what torchrun raised, other than that workers
    failed. limit: of attempts without a new snapshot.
    """
    if isinstance(failed, RendezvousStateError):
        # This node's secret is not the others'. Before the first attempt only the user can change that. Later, the
        # workers were stopped because of it, however they ended.
        return CRASHED if had_workers else USER_ERROR, str(failed)
    asked = isinstance(failed, SignalException)
    problem = _rendezvous_problem(failed, had_workers) if failed is not None and not asked else ""
    if ending is None and asked:
        if had_workers:
            return CRASHED, "ended at once by another signal, before the workers had stopped"
        return STOPPED, "stopped on request before anything started"
    if ending is None:
        return CRASHED, problem
    code = ending.code(asked)
    if code == FINISHED:
        return code, "finished"
    if code == STOPPED:
        return code, "stopped on request: start the same command again to go on"
    if code == CRASHED and problem:
        return code, problem
    gave_up = ""
    if code == CRASHED and not asked:
        gave_up = (
            f"gave up after {counted(limit, 'attempt')} in a row without a new snapshot "
            f"(launch.max_attempts_without_progress): "
        )
    return code, gave_up + ending.reasons[0]


def _rendezvous_problem(error: BaseException, had_workers: bool) -> str:
    """What the error of a rendezvous means, and what to look at."""
    if isinstance(error, RendezvousClosedError):
        return "the other nodes have ended the run: the reason is in their logs"
    if isinstance(error, (RendezvousTimeoutError, RendezvousConnectionError, DistNetworkError, DistStoreError)):
        lines = str(error.__cause__ or error).splitlines()  # some continue with a C++ stack trace
        detail = lines[0] if lines else type(error).__name__
        if had_workers and isinstance(error, RendezvousTimeoutError):  # the store answers
            return NOT_BACK
        return f"{LOST_CONTACT} ({detail})" if had_workers else no_contact(detail)
    return f"{type(error).__name__}: {error}"
