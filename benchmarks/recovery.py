"""`python benchmarks/recovery.py [--rounds 5]`: time from SIGKILL of a worker to a new step, and of a cold start.

Each round starts two processes under mingpt.launch, kills one with SIGKILL after a snapshot, waits for the first step
that had not been done before, and stops the run. The trainer measures the parts of its start itself (its line
"start: …"); this program measures the launcher's share from outside. Medians over the rounds, in seconds; ratio:
recovery / cold start in the same round.
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

    def __init__(self, run_dir: str) -> None:
        overrides = ["experiment=shakespeare_gpt2", f"run.dir={run_dir}", "train.log_every=1", "snapshot.every_steps=1"]
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mingpt.launch", "--nproc-per-node=2", *overrides],
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


def one_round(folder: str) -> dict[str, dict[str, float]]:
    run = Launched(folder)
    cold = parts(run.until(r"^start: ")[1])  # printed before the line of the first step
    cold_at, _ = run.until(r"^step +1/")
    cold_total = cold_at - run.began
    run.until(r"^step +20/")
    run.until(r"^step \d+: snapshot")  # of any step: with a slow store, some steps have none
    killed = time.perf_counter()
    os.kill(run.workers()[0], signal.SIGKILL)
    detected, _ = run.until(r"^launch: starting again")
    resumed = int(run.until(r"^resumed from step ")[1].split()[3])
    warm = {"detect": detected - killed} | parts(run.until(r"^start: ")[1])
    warm_at, _ = run.until(rf"^step +{resumed + 1}/")
    warm_total = warm_at - killed
    run.process.send_signal(signal.SIGTERM)
    code = run.process.wait(LIMIT)
    assert code == 75, code
    return {
        "cold start": cold | {"launcher": cold_total - sum(cold.values()), "total": cold_total},
        "recovery": warm | {"respawn": warm_total - sum(warm.values()), "total": warm_total},
        "ratio": {"total": warm_total / cold_total},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = []
    for _ in range(parser.parse_args().rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(one_round(folder))
    medians = {
        what: {part: round(statistics.median(r[what][part] for r in rounds), 2) for part in rounds[0][what]}
        for what in rounds[0]
    }
    print(json.dumps({"rounds": len(rounds), "medians": medians}, indent=1))


if __name__ == "__main__":
    main()
