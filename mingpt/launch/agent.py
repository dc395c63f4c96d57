"""torch's elastic agent with our rules: when workers are restarted, how they are stopped, what ends the launch."""

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import fields
from types import FrameType
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

from mingpt.cli.console import Say
from mingpt.config.schema import Config
from mingpt.errors import STOPPED, USER_ERROR
from mingpt.launch.ending import Ending, verdict
from mingpt.launch.newest import Newest, newest
from mingpt.launch.watchdog import RendezvousWatchdog
from mingpt.world import rendezvous
from mingpt.world.lifetime import AGAIN_SECONDS, STOP_SIGNALS, Lifetime, Phase
from mingpt.world.platforms import OPTIONS
from mingpt.world.secret import STATIC
from mingpt.world.standby import COMMAND, Standby

# The beginnings of torch's lines about an end whose reason our own lines say, and about one that has none: the workers
# have finished, and the head, which hosts the store, has left the exit barrier first (that is a stack trace).
TORCHS_LAST_LINES = (
    *("Received %s death signal", "Sending process %s closing signal", "failed (exitcode: %s)"),
    "Error waiting on exit barrier",
)
NOW_SECONDS = 3  # from a second request to stop until SIGKILL
WAITING_SECONDS = 1.5  # torch answers how many nodes wait from what it has read within the last second


class Agent(LocalElasticAgent):
    """Restarts the workers as long as attempts make progress; never after a user error, and never after a stop."""

    def __init__(
        self,
        config: LaunchConfig,
        spec: WorkerSpec,
        limit: int,
        shutdown_seconds: int,
        newest: Callable[[], Newest],
        say: Say,
        watchdog: RendezvousWatchdog,
        lifetime: Lifetime,
    ) -> None:
        """limit: the agent gives up after so many attempts in a row without a new snapshot.

        shutdown_seconds: from a request to stop until SIGKILL. newest: returns the newest snapshot. say:
        prints a line. watchdog: limits the wait for the rendezvous' host.
        """
        assert config.logs_specs is not None
        super().__init__(spec, config.logs_specs, config.start_method, 300, config.log_line_prefix_template)
        self.limit, self.shutdown_seconds = limit, shutdown_seconds
        self.newest, self.say = newest, say
        self.watchdog, self.lifetime = watchdog, lifetime
        self.stop_requests: list[float] = []  # the time of each
        self.over = False  # the exit code is decided: a signal that comes now must not change it
        self.ending: Ending | None = None  # of the latest attempt
        self._ended_workers: object = None  # the process context that `ending` describes
        first = newest()
        self._newest = {first.host: first.step}  # by the disk that has the run, when the agent last saw progress

    @property
    def has_workers(self) -> bool:
        return self._pcontext is not None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.ending = None
        # Workers inherit the mask, and unblock it once they handle signals (lifetime.begin). Without it, a Ctrl-C while
        # Python starts would end them with a stack trace and exit code 1, as if they had crashed.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            started = super()._start_workers(worker_group)
            for number in STOP_SIGNALS:  # in place of torch's handlers
                signal.signal(number, self._on_signal if number in handled else signal.SIG_IGN)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        # After unblocking: until here, a signal ends this process at once, and the kernel ends the workers with it.
        self.lifetime.ignore_signals()
        return started

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # Slurm and SkyPilot signal every process of a job: one request arrives several times.
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
            self.ending = Ending.of(result.failures.values())
            self._ended_workers = self._pcontext
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
            # Progress is a new snapshot, not a new step: a run that dies every 300 steps and saves every 500 makes new
            # steps for ever.
            newest = self.newest()
            # The steps of a run on another disk are not comparable with those that this node had: its copy of the run
            # may be from before a rewind, and its marker may tell of a run that is lost. Each disk has its own count,
            # so that a run which goes there and back makes no progress by that.
            if newest.step > self._newest.get(newest.host, 0):
                self._newest[newest.host] = newest.step
                self._remaining_restarts = self.limit
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
            while handler.num_nodes_waiting() <= 0:
                if time.monotonic() >= until:
                    return False
                time.sleep(0.1)
        except RendezvousError:  # the store's host is gone
            return False
        return True

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        # Not within torch's time: that is 30 s when the world changes its size, and always before torch 2.12.
        if self._pcontext is not None:
            if self.stop_requests:
                self.say("asked to stop: the workers end after a snapshot")
            # After a second request, workers that hang (a stopped process, a dead disk) get NOW_SECONDS.
            seconds = self.shutdown_seconds
            self._pcontext.close(death_sig, min(seconds, NOW_SECONDS) if len(self.stop_requests) > 1 else seconds)
        super()._shutdown(death_sig)
        if self._pcontext is None or self._pcontext is self._ended_workers:
            return
        if ended := self._pcontext.wait(0):
            self.ending = Ending.of(ended.failures.values())


class Forked(SubprocessHandler):
    """A worker of the standby's; without one, torch's own."""

    standby: Standby

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        # Not with what torchrun alone knows (PYTHON_EXEC, PET_REDIRECTS): another program, or files.
        plain = args == COMMAND and not self._stdout and not self._stderr
        return (plain and self.standby.fork(env)) or super()._popen(args, env)


def run(
    arguments: list[str], config: Config, port: int, say: Say, lifetime: Lifetime, standby: Standby | None = None
) -> tuple[int, str]:
    """Do with torchrun's arguments what torchrun does, by our agent; returns the exit code and the reason.

    port: of the rendezvous' host. say: prints a line. standby: what forks the workers; None: they start cold.
    """
    if standby:
        Forked.standby = standby
        processes.get_subprocess_handler = Forked  # type: ignore[assignment] # which is called with names
    leave_out_torchs_last_lines()
    # torchrun would read its options from these, too; launch/torchrun.py has read them, and all are arguments now.
    for name in [f"PET_{option.upper()}" for option in (*OPTIONS, "standalone", "no_python", "run_path", "module")]:
        os.environ.pop(name, None)
    limit = config.launch.max_attempts_without_progress
    watchdog = RendezvousWatchdog(port, config.world.init_timeout_seconds, config.world.timeout_seconds, say)
    # torchrun as a child process was tried and not taken: it can't tell a user error or a stop from a crash, its
    # workers have 30 s for a snapshot, and after a worker was killed the next step came later (54.7 s in place of 38.2,
    # c10d).
    agent: Agent | None = None
    failed: BaseException | None = None
    try:
        # Not those that an older torch does not know, of signals and time: our agent sees to both itself.
        options, _ = torchrun.get_args_parser().parse_known_args(arguments)
        launch, command, words = torchrun.config_from_args(options)
        answered = watchdog.start()  # a c10d rendezvous connects to its store when it is made
        spec = _spec(launch, command, words)
        answered()
        agent = Agent(
            launch, spec, limit, config.launch.shutdown_timeout_seconds, lambda: newest(config), say, watchdog, lifetime
        )
        agent.run()
    except (SignalException, Exception) as error:
        failed = error
    finally:
        lifetime.ignore_signals()
        if standby:
            standby.close()
        if agent:
            agent.over = True
            # A handler that is shut down closes a c10d rendezvous for good: after a stop of this node alone, the others
            # could not meet again.
            if not isinstance(failed, SignalException):
                spec.rdzv_handler.shutdown()
        watchdog.cancel()
    try:
        return verdict(agent.ending if agent else None, agent is not None and agent.has_workers, failed, limit)
    finally:
        del failed  # its traceback refers to this frame, which would keep the agent and its store alive


def leave_out_torchs_last_lines() -> None:
    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(
            lambda record: not str(record.msg).startswith(TORCHS_LAST_LINES)
        )


def _spec(config: LaunchConfig, command: Any, words: list[str]) -> WorkerSpec:
    """What the agent is to start. command, words: the workers' program and its arguments."""
    parameters = RendezvousParameters(
        config.rdzv_backend, config.rdzv_endpoint, config.run_id, config.min_nodes, config.max_nodes,
        config.local_addr, **config.rdzv_configs,
    )  # fmt: skip
    create = rendezvous.create_static if config.rdzv_backend == STATIC else rendezvous.create_c10d
    # Which options of the workers there are differs between torch's versions.
    same = {f.name: getattr(config, f.name) for f in fields(WorkerSpec) if hasattr(config, f.name)}
    return WorkerSpec(
        local_world_size=config.nproc_per_node, rdzv_handler=create(parameters), entrypoint=command, args=tuple(words),
        **same,
    )  # fmt: skip
