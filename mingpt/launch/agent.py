"""torch's elastic agent with our rules: when workers are restarted, how they are stopped, what ends the launch."""

import logging
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api

from mingpt.errors import STOPPED, USER_ERROR
from mingpt.launch.ending import Ending, verdict
from mingpt.launch.watchdog import RendezvousWatchdog
from mingpt.world import rendezvous
from mingpt.world.lifetime import AGAIN_SECONDS, STOP_SIGNALS, Lifetime, Phase
from mingpt.world.platforms import OPTIONS
from mingpt.world.secret import STATIC

# The beginnings of torch's lines about an end whose reason our own lines say.
REPEATS = "Received %s death signal", "Sending process %s closing signal", "failed (exitcode: %s)"
NOW_SECONDS = 3  # from a second request to stop until SIGKILL
WAITING_SECONDS = 1.5  # torch answers how many nodes wait from what it has read within the last second


class Agent(LocalElasticAgent):
    """Restarts the workers as long as attempts make progress; never after a user error, and never after a stop.

    limit: the agent gives up after so many attempts in a row without a new snapshot. newest: returns the step of the
    newest snapshot.
    """

    def __init__(
        self,
        *arguments: Any,
        limit: int,
        newest: Callable[[], int],
        say: Callable[[str], None],
        watchdog: RendezvousWatchdog,
        lifetime: Lifetime,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.limit, self.newest, self.say, self.watchdog, self.lifetime = limit, newest, say, watchdog, lifetime
        self.stop_requests: list[float] = []  # the time of each
        self.over = False  # the exit code is decided: a signal that comes now must not change it
        self.ending: Ending | None = None  # of the latest attempt
        self._ended_workers: object = None  # the process context that `ending` describes
        self._grace_seconds = int(options.get("shutdown_timeout") or 30)
        self._newest_step = newest()

    @property
    def has_workers(self) -> bool:
        return self._pcontext is not None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.ending = None
        # Workers inherit the mask, and unblock it once they handle signals (lifetime.begin). Without it, a Ctrl-C while
        # Python starts would end them with a stack trace and exit code 1, as if they had crashed.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            started = super()._start_workers(worker_group)
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, self._on_signal)  # replaces torch's handler
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        # After unblocking: until here, a signal ends this process at once, and the kernel ends the workers with it.
        self.lifetime.settle()
        return started

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = bool(self.stop_requests) and now - self.stop_requests[0] <= AGAIN_SECONDS
        if again or self.over:
            return
        self.stop_requests.append(now)
        raise SignalException(f"asked to stop: {signal.Signals(number).name}", signal.Signals(number))

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.lifetime.phase = Phase.STARTING  # a signal ends this process: torch's waits do not react to it
        # The c10d rendezvous connected when it was made: see `run`.
        static = worker_group.spec.rdzv_handler.get_backend() == STATIC
        answered = self.watchdog.start() if static else None
        try:
            super()._rendezvous(worker_group)
        finally:
            if answered:
                answered()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            self.ending, self._ended_workers = Ending.of(result.failures), self._pcontext
            self._set_remaining_restarts(self.ending)
        return result

    def _set_remaining_restarts(self, ending: Ending) -> None:
        """torch's loop reads this number next, and restarts the workers if it is above 0."""
        code = ending.code()
        if code == STOPPED and self._nodes_waiting():
            # Another node's agent has stopped its workers so that a new node can join. This restart is not counted.
            self._remaining_restarts += 1
        elif code in (USER_ERROR, STOPPED):
            self._remaining_restarts = 0
        else:
            step = self.newest()
            if step > self._newest_step:
                self._newest_step, self._remaining_restarts = step, self.limit
            if self._remaining_restarts:
                fruitless = self.limit - self._remaining_restarts
                count = f" ({fruitless} of {self.limit} attempts in a row without a new snapshot)" if fruitless else ""
                self.say(f"starting again{count} after {ending.reasons[0]}")

    def _nodes_waiting(self) -> bool:
        handler = self._worker_group.spec.rdzv_handler
        if handler.get_backend() == STATIC:
            return False
        until = time.monotonic() + (WAITING_SECONDS if not self.stop_requests else 0)
        try:
            while not (waiting := handler.num_nodes_waiting() > 0) and time.monotonic() < until:
                time.sleep(0.1)
        except RendezvousError:  # the store's host is gone
            return False
        return waiting

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # Called when the world changes its size. torch's own method waits 30 s, whatever --shutdown-timeout is.
        self._shutdown(timeout=self._grace_seconds)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self.has_workers and self.stop_requests:
            self.say("asked to stop: the workers end after a snapshot")
        # After a second request, workers that hang (a stopped process, a dead disk) get NOW_SECONDS.
        super()._shutdown(death_sig, timeout if len(self.stop_requests) < 2 else min(timeout, NOW_SECONDS))
        if self._pcontext is None or self._pcontext is self._ended_workers:
            return
        if ended := self._pcontext.wait(0):
            ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
            self.ending = Ending.of({ranks[local]: failure for local, failure in ended.failures.items()})


def run(
    arguments: list[str],
    limit: int,
    answer_seconds: float,
    silent_seconds: float,
    port: int,
    newest: Callable[[], int],
    say: Callable[[str], None],
    lifetime: Lifetime,
) -> tuple[int, str]:
    """Run torchrun's main function with our agent in it; returns the exit code and the reason.

    limit, newest: see Agent. answer_seconds, silent_seconds, port: see RendezvousWatchdog.
    """
    agents: list[Agent] = []
    watchdog = RendezvousWatchdog(port, answer_seconds, silent_seconds, say)
    answered = watchdog.start()  # torch connects to a c10d store before it makes the agent

    def make_agent(*positional: Any, **named: Any) -> Agent:
        answered()
        agents.append(
            Agent(*positional, limit=limit, newest=newest, say=say, watchdog=watchdog, lifetime=lifetime, **named)
        )
        return agents[0]

    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(
            lambda record: not str(record.msg).startswith(REPEATS)
        )
    rendezvous.register()
    # torchrun would read its options from these, too; launch/torchrun.py has read them, and all are arguments now.
    for name in [f"PET_{option.upper()}" for option in (*OPTIONS, "standalone", "no_python", "run_path", "module")]:
        os.environ.pop(name, None)
    # torch's launcher has no parameter for the agent's class: it looks this name up in its module.
    vars(api)["LocalElasticAgent"] = make_agent
    failed: BaseException | None = None
    try:
        options, unknown = torchrun.get_args_parser().parse_known_args(arguments)
        if unknown:  # torch before 2.12 has no --shutdown-timeout and waits 30 s
            say(f"torch {torch.__version__} has no {', '.join(unknown)}: left out")
        torchrun.run(options)
    except ChildFailedError:
        pass  # the agent's `ending` has the failures
    except (SignalException, Exception) as error:
        failed = error
    finally:
        lifetime.settle()
        for made in agents:
            made.over = True
        watchdog.cancel()
        vars(api)["LocalElasticAgent"] = LocalElasticAgent
    try:
        agent = agents[0] if agents else None
        return verdict(agent.ending if agent else None, agent is not None and agent.has_workers, failed, limit)
    finally:
        del failed  # its traceback refers to this frame, which would keep the agent and its store alive
