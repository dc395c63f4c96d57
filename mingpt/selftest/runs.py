"""The runs of `mingpt selftest`: real ones, with `mingpt launch`, and what ends runs: stop, kill, hang, no memory."""

import json
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from mingpt.errors import FINISHED, STOPPED, USER_ERROR
from mingpt.selftest import lockstep
from mingpt.selftest.result import Result

STEPS = 40
HANG_SECONDS = 10  # the limit of a wait in the run with a process that hangs
MEMORY = 8 << 30  # address space of the run that has too little
LEAVE_SECONDS = 3  # for processes after SIGKILL: longer for those that nobody reaps, in a container without init
RUN_SECONDS = 600  # the longest that one run may take
WORDS = 20_000  # of the text
SMALL = (
    "model=gpt-nano", "model.dropout=0.1", "batch.global_size=12", "batch.micro_size=2", "schedule.warmup_steps=2",
    f"train.max_steps={STEPS}", "snapshot.every_steps=4", "snapshot.hot_every_steps=0", "train.eval_every=0",
)  # fmt: skip
# What is measured, by device, and how many samples a step has for each process.
SPEED = {
    "cpu": (("model=gpt-mini", "batch.micro_size=4"), 8),
    "cuda": (("model=gpt2", "model.block_size=1024", "precision=bf16", "batch.micro_size=8"), 32),
}


class Broken(Exception):
    """A run ended before it did what was waited for."""


class Started:
    """A module run with arguments, in a session of its own, which ends with RUN_SECONDS at the latest.

    Its processes print in lockstep with `until`: at a step's line they are one or two steps further at most.
    """

    def __init__(self, arguments: list[str], memory: int | None = None) -> None:
        limit = (lambda: resource.setrlimit(resource.RLIMIT_AS, (memory, memory))) if memory else None
        self.process = lockstep.start(
            [sys.executable, "-u", "-m", *arguments],
            start_new_session=True,
            preexec_fn=limit,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.output = ""
        self._timer = threading.Timer(RUN_SECONDS, self.kill)
        self._timer.daemon = True
        self._timer.start()

    def until(self, pattern: str) -> str:
        """Read until a line matches; returns that. Raises Broken if the run ends before."""
        assert self.process.stdout
        for line in self.process.stdout:
            self.output += line
            if re.search(pattern, line):
                return line
        raise Broken(f"no line with {pattern!r}; the last ones: {self.output[-300:]}")

    def end(self) -> int:
        assert self.process.stdout
        self.output += self.process.stdout.read()
        code = self.process.wait()
        self._timer.cancel()
        return code

    def workers(self) -> list[psutil.Process]:
        family = psutil.Process(self.process.pid).children(recursive=True)
        found = []
        for process in family:
            with suppress(psutil.NoSuchProcess):
                if "mingpt.train" in process.cmdline():
                    found.append(process)
        return found

    def kill(self) -> None:
        """SIGKILL to the launcher and its workers, which have process groups of their own."""
        if self.process.poll() is None:
            launcher = psutil.Process(self.process.pid)
            workers = launcher.children(recursive=True)
            for process in (launcher, *workers):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            # One of them may still make the file that it was about to make.
            psutil.wait_procs(workers, LEAVE_SECONDS)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(LEAVE_SECONDS)

    def digest(self) -> str:
        found = re.findall(r"digest ([0-9a-f]{64})", self.output)
        return found[-1] if found else "none"


class Runs:
    """Runs below `folder` on a device ("cpu" or "cuda"), with up to `most` processes."""

    def __init__(self, folder: Path, device: str, most: int) -> None:
        self.folder, self.device, self.most = folder, device, most
        self.digest = ""  # of the undisturbed run
        self.started: list[Started] = []
        rng = random.Random(1)
        text = " ".join("".join(rng.choices("abcdefgh", k=rng.randint(1, 7))) for _ in range(WORDS))
        (folder / "text.txt").write_text(text)

    def start(
        self, name: str, world: int, *overrides: str, memory: int | None = None, module: str = "mingpt.launch"
    ) -> Started:
        own = [f"data.path={self.folder}/text.txt", f"run.dir={self.folder}/{name}", f"world.device={self.device}"]
        quiet = ["track=[]", "train.log_every=1", "train.threads=1"]
        processes = [f"--nproc-per-node={world}"] if module == "mingpt.launch" else []
        self.started.append(Started([module, *processes, *own, *quiet, *(overrides or SMALL)], memory))
        return self.started[-1]

    def close(self) -> None:
        """End what still runs: after a check that failed, or a request to stop."""
        for run in self.started:
            run.kill()

    def worlds(self) -> list[int]:
        """1, 2, 3 and all, as far as there are so many devices."""
        return sorted({w for w in (1, 2, 3, self.most) if w <= self.most})

    def checks(self) -> Iterator[Result]:
        """One after another; the first ones say what the undisturbed run's digest is."""
        for check in (
            self.undisturbed,
            self.fast,
            self.stopped,
            self.killed,
            self.hung,
            self.without_memory,
            self.synchronised,
        ):
            try:
                yield from check()
            except Broken as error:
                yield Result(check.__name__.replace("_", " "), False, str(error))

    def undisturbed(self) -> Iterator[Result]:
        digests = dict[int, str]()
        for world in self.worlds():
            run = self.start(f"world-{world}", world)
            if code := run.end():
                raise Broken(f"{world} processes: exit code {code}: {run.output[-300:]}")
            digests[world] = run.digest()
        self.digest = digests[1]
        shown = ", ".join(f"{w}: {d[:16]}" for w, d in digests.items())
        yield Result("a run of any number of processes has the same bits", len(set(digests.values())) == 1, shown)

    def fast(self) -> Iterator[Result]:
        """The control: a comparison that can't fail would say nothing."""
        run = self.start("fast", self.worlds()[-1], *SMALL, "reduce=fast")
        run.end()
        differs = run.digest() not in (self.digest, "none")
        yield Result("with reduce=fast they differ, so the comparison can fail", differs, run.digest()[:16])

    def stopped(self) -> Iterator[Result]:
        run = self.start("stopped", self.worlds()[-1])
        run.until(r"^step +5/")
        asked = time.monotonic()
        for process in (run.process, *run.workers()):  # each one, as platforms do
            process.send_signal(signal.SIGTERM)
        code = run.end()
        seconds = time.monotonic() - asked
        again = self.start("stopped", 1)
        ends = code == STOPPED and again.end() == FINISHED and again.digest() == self.digest
        yield Result(
            "stopped, and resumed with one process: the same bits", ends, f"exit code {code} after {seconds:.1f} s"
        )

    def killed(self) -> Iterator[Result]:
        yield from self._hurt("killed", signal.SIGKILL)

    def hung(self) -> Iterator[Result]:
        yield from self._hurt("hung", signal.SIGSTOP, f"world.timeout_seconds={HANG_SECONDS}")

    def _hurt(self, name: str, signal_number: int, *overrides: str) -> Iterator[Result]:
        """Send the signal to a worker after step 5: the launcher starts the run again by itself.

        Snapshots hold the training up, so that step 4's is there: one beside it may end after step 5 on a slow disk.
        """
        run = self.start(name, self.worlds()[-1], *SMALL, "snapshot.asynchronous=false", *overrides)
        run.until(r"^step +5/")
        run.workers()[-1].send_signal(signal_number)
        since = time.monotonic()
        run.until("resumed from step")
        seconds = time.monotonic() - since
        ends = run.end() == FINISHED and run.digest() == self.digest
        limit = f", {HANG_SECONDS} of them the limit" if overrides else ""
        yield Result(f"a process {name}: the same bits", ends, f"goes on after {seconds:.1f} s{limit}")

    def without_memory(self) -> Iterator[Result]:
        if self.device != "cpu":
            yield Result("a process without memory", None, "not tried on a GPU")
            return
        large = ("model=gpt-nano", "model.n_layer=1", "model.n_head=1", "model.n_embd=30000", "train.max_steps=1")
        began = time.monotonic()
        run = self.start("memory", 1, *large, "launch.max_attempts_without_progress=1", memory=MEMORY)
        code = run.end()
        told = "out of memory" in run.output
        text = f"exit code {code} after {time.monotonic() - began:.1f} s"
        # 64, since another attempt's first step would fail, too (world/failures.py)
        yield Result("a process without memory ends, and says why", code == USER_ERROR and told, text)

    def synchronised(self) -> Iterator[Result]:
        """On a GPU: steps with a snapshot in flight, in which no operation may wait for the device."""
        what = "no step waits for the GPU"
        if self.device == "cpu":
            yield Result(what, None, "there is none")
            return
        run = self.start("syncs", 1, module="mingpt.selftest.syncs")
        code = run.end()
        waits = re.findall(r"called a synchronizing CUDA operation.*", run.output)
        pinned = re.findall(r"pinned: .*", run.output)
        yield Result(what, code == FINISHED, "; ".join([f"exit code {code}", *waits[:1], *pinned]))

    def speed(self, peaks: dict[str, float | None]) -> Iterator[Result]:
        """Tokens a second, exact and fast in turns; and what a snapshot costs."""
        n = self.most
        model, samples = SPEED[self.device]
        settings = (*model, f"batch.global_size={n * samples}")
        rates = dict[str, float]()
        for reduce in ("exact", "fast"):
            steps = ("train.max_steps=24", "schedule.warmup_steps=2", "train.eval_every=0", "snapshot.every_steps=12")
            run = self.start(f"speed-{reduce}", n, *settings, *steps, "snapshot.hot_every_steps=0", f"reduce={reduce}")
            run.until(r"^attempt ")
            parameters = int(re.findall(r"([\d,]+) parameters", run.output)[-1].replace(",", ""))
            if run.end():
                raise Broken(run.output[-300:])
            rates[reduce] = statistics.median(self._rows(f"speed-{reduce}", "tokens_per_second")[4:])
        peak = peaks["bf16" if self.device == "cuda" else "fp32"]
        share = f", {rates['exact'] * 6 * parameters / peak / n:.0%} of the peak" if peak else ""
        yield Result("speed", None, f"{rates['exact']:,.0f} tokens/s with {n} processes{share}")
        yield Result("exact / fast", None, f"{rates['exact'] / rates['fast']:.3f} (one run each)")
        ledger = json.loads(next((self.folder / "speed-exact/ledger").iterdir()).read_text())
        stall = ledger["seconds"].get("snapshot", 0.0) / max(1, len(ledger["snapshots"]))
        yield Result("a snapshot holds training up for", None, f"{stall:.3f} s of {parameters:,} parameters")

    def _rows(self, name: str, key: str) -> list[float]:
        lines = (self.folder / name / "metrics/attempt-00001.jsonl").read_text().splitlines()
        return [row[key] for row in map(json.loads, lines) if key in row]
