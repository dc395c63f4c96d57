"""torch's elastic agent with our exit codes: what ends a run for good, what is tried again, and what is said last."""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.launcher import api

from mingpt.errors import CRASHED, FINISHED, STOPPED, USER_ERROR
from mingpt.world import network, rendezvous
from mingpt.world.failures import LOST_PEER
from mingpt.world.lifetime import AGAIN_SECONDS, STOP_SIGNALS, Lifetime
from mingpt.world.platforms import OPTIONS
from mingpt.world.secret import STATIC

NOW_SECONDS = 3  # from a second request to SIGKILL
CONTACT_SECONDS = 5  # beyond world.init_timeout_seconds: torch's own limit comes first where it works


@dataclass(frozen=True)
class Ending:
    """How this node's workers ended in an attempt: exit codes and reasons of those that failed, the cause first."""

    codes: list[int]
    reasons: list[str]

    @classmethod
    def of(cls, failures: Mapping[int, ProcessFailure]) -> "Ending":
        """From the failures by rank."""
        told = {rank: _reason(failure) for rank, failure in failures.items()}

        def order(rank: int) -> tuple[bool, bool, int]:
            code = failures[rank].exitcode
            # Victims last: those who lost a peer, and those whom the agent has asked to end.
            return code != USER_ERROR, LOST_PEER in told[rank] or code in (STOPPED, -signal.SIGTERM), rank

        ranks = sorted(told, key=order)
        return cls([failures[rank].exitcode for rank in ranks], [f"process {rank}: {told[rank]}" for rank in ranks])

    def code(self, asked: bool = False) -> int:
        """The run's exit code if it ends here. `asked`: whether this agent was asked to stop."""
        if USER_ERROR in self.codes:
            return USER_ERROR
        # A worker that is asked to end in the milliseconds before it listens dies of the signal; nothing is lost.
        early = {-number for number in STOP_SIGNALS}
        if self.codes and set(self.codes) <= {STOPPED} | early and (asked or STOPPED in self.codes):
            return STOPPED
        return CRASHED if self.codes else FINISHED


def _reason(failure: ProcessFailure) -> str:
    """A worker's last words (lifetime.leave_reason), or what its exit code says."""
    message = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    if isinstance(message, dict) and message.get("message"):
        return str(message["message"])
    if failure.exitcode == -signal.SIGKILL:
        return "killed (SIGKILL). If nobody did that, memory ran out: lower batch.micro_size or data.workers"
    if failure.exitcode < 0:
        return f"ended by {signal.Signals(-failure.exitcode).name}"
    return "stopped on request after a snapshot" if failure.exitcode == STOPPED else f"exit code {failure.exitcode}"


class Agent(LocalElasticAgent):
    """Restarts the workers while attempts make progress; never after a mistake, and never after a stop.

    limit: attempts in a row without progress, after which it gives up. newest: asks for the newest snapshot's step.
    """

    def __init__(
        self,
        *arguments: Any,
        limit: int,
        newest: Callable[[], int],
        say: Callable[[str], None],
        watch: Callable[[], Callable[[], None]],
        lifetime: Lifetime,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.limit, self.newest, self.say, self.watch, self.lifetime = limit, newest, say, watch, lifetime
        self.requests: list[float] = []  # to stop: when they came
        self.ending: Ending | None = None  # of the latest attempt
        self._told: object = None  # the workers whose ending that is
        self._grace = int(options.get("shutdown_timeout") or 30)
        self._reached = newest()

    @property
    def has_workers(self) -> bool:
        return self._pcontext is not None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.ending = None
        # Workers inherit what is blocked until they listen (lifetime.begin): a Ctrl-C during Python's own start would
        # end them with a stack trace and exit code 1, as if they had crashed.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            started = super()._start_workers(worker_group)
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, self._on_signal)  # in place of torch's own handler
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        # Only now: a signal that came a moment ago has ended us, and with us workers that had not begun.
        self.lifetime.settle()
        return started

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requests and now - self.requests[0] <= AGAIN_SECONDS:
            return  # the same request again: a platform may signal every process, and each hands it on
        self.requests.append(now)
        raise SignalException(f"asked to stop: {signal.Signals(number).name}", signal.Signals(number))

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.lifetime.wait_for_nodes()
        met = self.watch() if worker_group.spec.rdzv_handler.get_backend() == STATIC else None
        try:
            super()._rendezvous(worker_group)
        finally:
            if met:
                met()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            self.ending, self._told = Ending.of(result.failures), self._pcontext
            self._decide(self.ending)
        return result

    def _decide(self, ending: Ending) -> None:
        """Set how many restarts are left: the agent's own loop looks at that number next."""
        code = ending.code()
        if code == STOPPED and self._nodes_waiting():
            # Another node's agent has stopped its workers to let a node in: the world grows, nobody wants an end.
            self._remaining_restarts += 1
        elif code in (USER_ERROR, STOPPED):
            self._remaining_restarts = 0
        else:
            reached = self.newest()
            if reached > self._reached:
                self._reached, self._remaining_restarts = reached, self.limit
            if self._remaining_restarts:
                fruitless = self.limit - self._remaining_restarts
                count = f" ({fruitless} of {self.limit} attempts in a row without a new snapshot)" if fruitless else ""
                self.say(f"starting again{count} after {ending.reasons[0]}")

    def _nodes_waiting(self) -> bool:
        try:
            return self._worker_group.spec.rdzv_handler.num_nodes_waiting() > 0
        except RendezvousError:  # the store's host is gone
            return False

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # For a change of the world's size: torch would give the snapshot 30 s here, whatever the option says.
        self._shutdown(timeout=self._grace)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # A second request: what has not ended by then never will (a stopped process, a dead disk).
        super()._shutdown(death_sig, timeout if len(self.requests) < 2 else min(timeout, NOW_SECONDS))
        if self._pcontext is None or self._pcontext is self._told:
            return
        if ended := self._pcontext.wait(0):
            ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
            self.ending = Ending.of({ranks[local]: failure for local, failure in ended.failures.items()})


def _no_contact(what: object) -> str:
    return (
        f"no contact with the node that hosts the rendezvous, or not all nodes have come within "
        f"world.init_timeout_seconds: are all up, are the address and --rdzv-id right, is the port open? ({what})"
    )


LOST_CONTACT = (
    "lost contact with the node that hosts the rendezvous: it has ended, or sent nothing for world.timeout_seconds: "
    "look at that node and its log, then start the same command again"
)


@dataclass
class Contact:
    """Ends this process in bounded time when a stranger listens at the rendezvous' address and says nothing.

    torch's limits do not cover the wait for the first words, and the main thread is inside of it, deaf to signals.
    wait_seconds: for the first words of what listens at `port`; silent_seconds: later, when the kernel watches.
    """

    port: int
    wait_seconds: float
    silent_seconds: float
    say: Callable[[str], None]
    timers: list[threading.Timer] = field(default_factory=list)

    def watch(self) -> Callable[[], None]:
        """Begin a wait. To be called once the first words have been said: what this returns."""
        timer = threading.Timer(self.wait_seconds + CONTACT_SECONDS, self._give_up)
        timer.daemon = True
        timer.start()
        self.timers.append(timer)

        def met() -> None:
            timer.cancel()
            network.limit_silence(self.port, self.silent_seconds)

        return met

    def forget(self) -> None:
        """A rendezvous that failed has met nobody."""
        for timer in self.timers:
            timer.cancel()

    def _give_up(self) -> None:
        self.say(f"exit code {CRASHED}: {_no_contact('what listens there does not answer')}")
        os._exit(CRASHED)  # no worker has been started


def run(
    arguments: list[str],
    limit: int,
    wait_seconds: float,
    silent_seconds: float,
    port: int,
    newest: Callable[[], int],
    say: Callable[[str], None],
    lifetime: Lifetime,
) -> tuple[int, str]:
    """torchrun's own main function with our agent in it; returns the exit code and the reason of the end.

    wait_seconds: for the rendezvous' host, at `port`, to answer first; silent_seconds: later.
    """
    agents: list[Agent] = []
    contact = Contact(port, wait_seconds, silent_seconds, say)
    met = contact.watch()  # c10d: made before the agent; static: by the agent

    def make_agent(*positional: Any, **named: Any) -> Agent:
        met()
        watch = contact.watch
        agents.append(Agent(*positional, limit=limit, newest=newest, say=say, watch=watch, lifetime=lifetime, **named))
        return agents[0]

    rendezvous.register()
    # All that torchrun would take from there has been read (platforms.py) and is among the arguments.
    for name in [f"PET_{option.upper()}" for option in (*OPTIONS, "standalone", "no_python", "run_path", "module")]:
        os.environ.pop(name, None)
    # torch's launcher takes its agent's class from this name, and has no other place where ours could come in.
    vars(api)["LocalElasticAgent"] = make_agent
    failed: BaseException | None = None
    try:
        options, unknown = torchrun.get_args_parser().parse_known_args(arguments)
        if unknown:  # --shutdown-timeout came with torch 2.12; before, it is 30 s
            say(f"torch {torch.__version__} has no {', '.join(unknown)}: left out")
        torchrun.run(options)
    except ChildFailedError:
        pass  # who failed, and why, is in the agent's ending
    except (SignalException, Exception) as error:
        failed = error
    finally:
        contact.forget()
        vars(api)["LocalElasticAgent"] = LocalElasticAgent
    try:
        return _verdict(agents[0] if agents else None, failed, limit)
    finally:
        del failed  # its traceback holds this frame, and with it the agent and its store


def _verdict(agent: Agent | None, failed: BaseException | None, limit: int) -> tuple[int, str]:
    """The exit code and its reason. agent: None if the rendezvous made none. failed: what torchrun raised."""
    ending, began = (agent.ending, agent.has_workers) if agent else (None, False)
    if isinstance(failed, RendezvousStateError):  # whatever has become of the workers, whom the agent asked to stop
        # Another secret than the others' would be that at the next try, too.
        return CRASHED if began else USER_ERROR, str(failed)
    asked = isinstance(failed, SignalException)
    problem = _about(failed, began) if failed is not None and not asked else ""
    if ending is None and asked:
        if began:
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
    gave_up = f"gave up after {limit} attempts in a row without a new snapshot (launch.max_attempts_without_progress): "
    return code, (gave_up if code == CRASHED and not asked else "") + ending.reasons[0]


def _about(error: BaseException, began: bool) -> str:
    """What the rendezvous says, in words that name what to look at. began: whether there have been workers."""
    if isinstance(error, RendezvousClosedError):
        return "the other nodes have ended the run: the reason is in their logs"
    if isinstance(error, (RendezvousTimeoutError, RendezvousConnectionError, DistNetworkError, DistStoreError)):
        told = str(error.__cause__ or error).splitlines()  # some go on with a stack trace of C++
        what = told[0] if told else type(error).__name__
        lost = began and not isinstance(error, RendezvousTimeoutError)  # that one: others have not come back
        return f"{LOST_CONTACT} ({what})" if lost else _no_contact(what)
    return f"{type(error).__name__}: {error}"
