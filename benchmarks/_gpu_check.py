"""`benchmarks/gpu_check.sh`: what a GPU computes, and how fast; sections in order of worth, each with a limit.

A section that takes too long, or fails, leaves the time to the next one, and what was found is written at once: a check
that ends early has the figures so far. The exit code is 1 if a section failed or bits differed, else 0.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _gpu_sections as sections

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Scale:
    """How large the runs are. The tiny one is for a machine without a GPU, and measures nothing."""

    model: tuple[str, ...]
    large: tuple[str, ...]  # of the section `stall`: GPT-2 355M with AdamW's moments is 4.3 GB
    block: int
    batch: int  # samples of a step
    micros: tuple[int, int]
    steps: int
    compile: bool


GPT2 = Scale(("model=gpt2", "precision=bf16"), ("model=gpt2-medium", "precision=bf16"), 1024, 64, (8, 32), 26, True)
TINY_MODEL = ("model=gpt-nano", "model.block_size=16", "precision=fp32")
TINY = Scale(TINY_MODEL, TINY_MODEL, 16, 16, (2, 4), 9, False)


class Check:
    """Where results go, how commands are run, and how much time is left. Each wait ends with the section's time."""

    def __init__(self, out: Path, scale: Scale, seconds: float) -> None:
        self.out, self.scale = out, scale
        self.began = time.monotonic()
        self.end = self.section_end = self.began + seconds
        self.rows_found: list[dict[str, Any]] = []
        for old in ("runs", "logs", "cache", "results.jsonl", "kernels.txt", "kernels-off.txt", "README.md"):
            path = out / old
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        (out / "logs").mkdir(parents=True)
        # Caches of its own, so that the first compiled run compiles anew and the others find its kernels.
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{out}/cache/inductor", "TRITON_CACHE_DIR": f"{out}/cache/triton"}
        ours = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # a checkout is not installed
        caches["TORCHINDUCTOR_COMPILE_THREADS"] = "4"  # of each of the processes that run at once
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": ours, **caches}

    def left(self) -> float:
        """Seconds of this section."""
        return min(self.section_end, self.end) - time.monotonic()

    def found(self, section: str, what: str, **figures: Any) -> None:
        """One line of results.jsonl, and the page anew."""
        row = {"section": section, "what": what, **figures}
        self.rows_found.append(row)
        with (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        (self.out / "README.md").write_text(page(self.rows_found))
        print(f"[{time.monotonic() - self.began:5.0f} s] {json.dumps(row)}", flush=True)

    def start(self, name: str, *words: str) -> "subprocess.Popen[bytes]":
        """`python WORDS` with both outputs in logs/NAME.txt, in a group of its own, which `wait` can end."""
        with (self.out / "logs" / f"{name}.txt").open("w") as log:
            log.write(f"$ python {' '.join(words)}\n")
            log.flush()
            return subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self, process: "subprocess.Popen[bytes]", limit: float | None = None) -> int | None:
        """Its exit code; None if it was killed since the section's time was over, -9 if `limit` seconds were."""
        try:
            return process.wait(max(0.1, self.left() if limit is None else min(limit, self.left())))
        except subprocess.TimeoutExpired:
            self.kill(process)
            return None if self.left() < 1 else -signal.SIGKILL

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        """kill -9 of a launcher (or a program); workers end when their launcher is gone."""
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def launch(self, name: str, *more: str, processes: int = 1, model: tuple[str, ...] | None = None) -> list[str]:
        """The words of a new run. Keys that `more` gives replace the usual ones."""
        usual = [
            "data.kind=random", *(model or self.scale.model), f"batch.micro_size={self.scale.micros[0]}",
            f"batch.global_size={self.scale.batch}", "train.log_every=1", "train.eval_every=0",
            "snapshot.every_steps=0", "snapshot.every_seconds=0", "snapshot.hot_every_steps=0", "track=[]",
        ]  # fmt: skip
        given = {word.partition("=")[0] for word in more}
        given |= {"data.kind"} if "data" in given else set()
        kept = [word for word in usual if word.partition("=")[0] not in given]
        launch = ["-m", "mingpt", "launch", f"--nproc-per-node={processes}"]
        return [*launch, *kept, f"run.dir={self.out}/runs/{name}", *more]

    def train(
        self, name: str, *more: str, model: tuple[str, ...] | None = None, limit: float | None = None
    ) -> int | None:
        """A run to its end: see `wait`."""
        return self.wait(self.start(name, *self.launch(name, *more, model=model)), limit)

    def log(self, name: str) -> str:
        path = self.out / "logs" / f"{name}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def tail(self, name: str) -> list[str]:
        """For results of runs that failed."""
        return [line[:300] for line in self.log(name).splitlines()[-4:]]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The metrics of a run's steps; a line that was being written when the run was killed is left out."""
        files = sorted((self.out / "runs" / name / "metrics").glob("*.jsonl"))
        rows = [json.loads(line) for file in files for line in file.read_text().split("\n")[:-1]]
        return [row for row in rows if "step_seconds" in row]

    def forget(self, name: str) -> None:
        """Room on the disk: a snapshot of GPT-2 is 1.5 GB."""
        shutil.rmtree(self.out / "runs" / name / "snapshots", ignore_errors=True)


def page(rows: list[dict[str, Any]]) -> str:
    """The results, a list for each section."""
    lines, section = ["# What this machine computes, and how fast"], ""
    for row in rows:
        if row["section"] != section:
            section = row["section"]
            lines += ["", f"## {section}", ""]
        figures = [f"{name} {value}" for name, value in row.items() if name not in ("section", "what")]
        lines.append(f"- **{row['what']}**: {'; '.join(figures)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8, help="for all of it; default: %(default)s")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu_check", help="default: %(default)s")
    options = parser.parse_args()
    scale = GPT2 if torch.cuda.is_available() else TINY
    check = Check(options.out.resolve(), scale, options.minutes * 60)
    for section, seconds in sections.SECTIONS:
        name = section.__name__
        check.section_end = time.monotonic() + seconds
        if check.left() < 5:
            check.found(name, "no time", left=round(check.left()))
            continue
        try:
            section(check)
        except Exception as error:  # told in the page; the next section has its own chance
            (check.out / "logs" / f"{name}-failed.txt").write_text(traceback.format_exc())
            check.found(name, "failed", failed=f"{type(error).__name__}: {error}"[:500])
    sections.start(check)  # it waits for nothing
    bad = [row for row in check.rows_found if "failed" in row or row.get("equal") is False]
    print(f"{check.out}/README.md" + "".join(f"\nNOT AS IT SHOULD BE: {json.dumps(row)}" for row in bad))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
