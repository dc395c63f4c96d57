"""A time limit for the first answer of the rendezvous' host. torch has none there."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from mingpt.cli.console import Say
from mingpt.errors import CRASHED, exit_now
from mingpt.launch.ending import no_contact
from mingpt.world import network

EXTRA_SECONDS = 5  # beyond world.init_timeout_seconds: where torch's own limit works, it comes first


@dataclass
class RendezvousWatchdog:
    """Ends this process if what listens at the rendezvous' port accepts the connection and never answers."""

    port: int  # of the rendezvous' host
    answer_seconds: float  # limit for the first answer
    silent_seconds: float  # limit for each later one, which the kernel enforces
    say: Say  # prints a line
    timers: list[threading.Timer] = field(default_factory=list)  # that may run

    def start(self) -> Callable[[], None]:
        """Start the limit. Returns what the caller calls once the host has answered."""
        # The main thread is inside torch's C++ code meanwhile and runs no signal handler: only a thread can end this.
        timer = threading.Timer(self.answer_seconds + EXTRA_SECONDS, self._give_up)
        timer.daemon = True
        timer.start()
        self.timers.append(timer)

        def answered() -> None:
            timer.cancel()
            network.limit_silence(self.port, self.silent_seconds)

        return answered

    def cancel(self) -> None:
        """Stop all limits, on every way out: a rendezvous that had failed left a timer that ended the process later."""
        for timer in self.timers:
            timer.cancel()

    def _give_up(self) -> None:
        self.say(f"exit code {CRASHED}: {no_contact('what listens there does not answer')}")
        exit_now(CRASHED)  # no worker has been started
