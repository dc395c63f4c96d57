"""`python benchmarks/recovery.py [--rounds 5]`: time from SIGKILL of a worker to a new step, and of a cold start.

Each round starts two processes under mingpt.launch, kills one with SIGKILL after a snapshot, waits for the first step
that had not been done before, and stops the run: without the warm standby (MINGPT_STANDBY=0), and with it. The trainer
measures the parts of its start itself (its line "start: …"); this program measures the launcher's share from outside.
Medians over the rounds, in seconds; ratios: to the cold start, the one without a standby, of the same round.

--uncached: each start and each recovery finds a cold file system: see `forget`.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from queue import Queue
from threading import Thread

LIMIT = 120  # seconds to wait for any line


class Launched:
    """A run under mingpt.launch, whose lines are read with the time at which they came."""

    def __init__(self, run_dir: str, standby: str) -> None:
        overrides = ["experiment=shakespeare_gpt2", f"run.dir={run_dir}", "train.log_every=1", "snapshot.every_steps=1"]
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mingpt.launch", "--nproc-per-node=2", *overrides],
            env={**os.environ, "MINGPT_STANDBY": standby},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: Queue[tuple[float, str]] = Queue()
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.put((time.perf_counter(), line))

    def until(self, pattern: str) -> tuple[float, str]:
        """Wait for a line that matches: its time and text. Raises queue.Empty after LIMIT seconds without any line."""
        while True:
            at, line = self.lines.get(timeout=LIMIT)
            if re.search(pattern, line):
                return at, line

    def workers(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def parts(line: str) -> dict[str, float]:
    return {name.strip(): float(seconds) for name, seconds in re.findall(r"([a-z ]+) (\d+\.\d+) s", line)}


def forget(uncached: bool) -> None:
    """Have the system drop what it holds of this environment's files, but for what a process has mapped."""
    for path in Path(sys.prefix).rglob("*") if uncached else ():
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start_and_recovery(standby: str, uncached: bool) -> tuple[dict[str, float], dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        forget(uncached)
        run = Launched(folder, standby)
        start = parts(run.until(r"^start: ")[1])  # printed before the line of the first step
        started, _ = run.until(r"^step +1/")
        start_total = started - run.began
        run.until(r"^step +20/")
        run.until(r"^step \d+: snapshot")  # of any step: with a slow store, some steps have none
        forget(uncached)
        killed = time.perf_counter()
        os.kill(run.workers()[-1], signal.SIGKILL)  # the first child is the standby
        detected, _ = run.until(r"^launch: starting again")
        resumed = int(run.until(r"^resumed from step ")[1].split()[3])
        again = {"detect": detected - killed} | parts(run.until(r"^start: ")[1])
        again_at, _ = run.until(rf"^step +{resumed + 1}/")
        again_total = again_at - killed
        run.process.send_signal(signal.SIGTERM)
        code = run.process.wait(LIMIT)
        assert code == 75, code
    return (
        start | {"launcher": start_total - sum(start.values()), "total": start_total},
        again | {"respawn": again_total - sum(again.values()), "total": again_total},
    )


def one_round(number: int, uncached: bool) -> dict[str, dict[str, float]]:
    order = "01" if number % 2 else "10"  # by turns, since others may use the machine more and more
    measured = {standby: start_and_recovery(standby, uncached) for standby in order}
    (cold, cold_again), (warm, warm_again) = measured["0"], measured["1"]
    times = {"cold start": cold, "cold recovery": cold_again, "start": warm, "recovery": warm_again}
    return times | {"ratio": {what: found["total"] / cold["total"] for what, found in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--uncached", action="store_true")
    given = parser.parse_args()
    rounds = [one_round(number, given.uncached) for number in range(given.rounds)]
    medians = {
        what: {part: round(statistics.median(r[what][part] for r in rounds), 2) for part in rounds[0][what]}
        for what in rounds[0]
    }
    each = [round(r["ratio"]["recovery"], 2) for r in rounds]
    print(json.dumps({"rounds": len(rounds), "medians": medians, "recovery / cold start": each}, indent=1))


if __name__ == "__main__":
    main()
