"""A time limit for the first answer of the rendezvous' host. torch has none there."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from mingpt.errors import CRASHED, exit_now
from mingpt.launch.ending import no_contact
from mingpt.world import network

EXTRA_SECONDS = 5  # beyond world.init_timeout_seconds: where torch's own limit works, it comes first


@dataclass
class RendezvousWatchdog:
    """Ends this process if what listens at the rendezvous' port accepts the connection and never answers.

    torch's limits do not cover the wait for the first answer. The main thread is inside torch's C++ code then and runs
    no signal handler, so a timer's thread ends the process.

    answer_seconds: limit for the first answer. silent_seconds: limit for each later one, which the kernel enforces.
    """

    port: int
    answer_seconds: float
    silent_seconds: float
    say: Callable[[str], None]
    timers: list[threading.Timer] = field(default_factory=list)

    def start(self) -> Callable[[], None]:
        """Start the limit. Returns what the caller calls once the host has answered."""
        timer = threading.Timer(self.answer_seconds + EXTRA_SECONDS, self._give_up)
        timer.daemon = True
        timer.start()
        self.timers.append(timer)

        def answered() -> None:
            timer.cancel()
            network.limit_silence(self.port, self.silent_seconds)

        return answered

    def cancel(self) -> None:
        """For a rendezvous that has failed: nobody will answer it."""
        for timer in self.timers:
            timer.cancel()

    def _give_up(self) -> None:
        self.say(f"exit code {CRASHED}: {no_contact('what listens there does not answer')}")
        exit_now(CRASHED)  # no worker has been started
