"""The storage server of a campaign: whoever kills it, it is there again a random short time later, with its data."""

import os
import random
import signal
import threading
from pathlib import Path

from node_kit import wait_until
from store_kit import ProxiedMoto, forget_clients

LONGEST_ABSENCE = 8.0  # seconds; shorter and longer than snapshot.retry_seconds


class Keeper:
    """Starts the server again on its port. pid_file: where those find its process id who are to kill it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chooser, self.pid_file = random.Random(seed), folder / "server-pid"
        self.server = ProxiedMoto(folder / "store")
        self.deaths = 0
        self.present, self.closed = threading.Event(), threading.Event()
        self.problem: BaseException | None = None
        self._start()
        os.environ.update(self.server.environment(self.server.port))
        forget_clients()
        self.server.make_bucket()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _start(self) -> None:
        self.server.start()
        assert self.server.process
        self.pid_file.write_text(str(self.server.process.pid))
        self.present.set()

    def _keep(self) -> None:
        try:
            while not self.closed.is_set():
                assert self.server.process
                self.server.process.wait()
                self.present.clear()
                self.deaths += 1
                if not self.closed.wait(self.chooser.uniform(0.1, LONGEST_ABSENCE)):
                    self._start()
        except BaseException as problem:
            self.problem = problem

    def kill(self) -> bool:
        """False if it is dead already."""
        if not self.present.is_set():
            return False
        before = self.deaths
        os.kill(int(self.pid_file.read_text()), signal.SIGKILL)
        wait_until(lambda: self.deaths > before, "the server is dead")
        return True

    def come_back(self) -> None:
        """Wait until it is there."""
        wait_until(lambda: self.present.is_set() or self.problem, "the server is there again")
        if self.problem:
            raise self.problem

    def close(self) -> None:
        self.closed.set()
        self.server.close()
        self._thread.join()
