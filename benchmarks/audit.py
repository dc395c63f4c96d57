"""`python benchmarks/audit.py [--corruptions 20] [--steps 1000] [--seed 1]`: what `mingpt audit` finds.

A run of three attempts with 1, 2 and 3 processes (torchrun, gloo), the first two of them killed, is audited whole: each
alarm is a false one. Then one attempt after another is computed again, and in one process, after one step, one bit of
one weight or moment flips in memory; or one bit of a step's record in the trace. Each is audited: found or not, with
which attempt, interval and step. A flip that leaves no bit of any snapshot and of the trace changed is drawn anew, and
counted: nothing is wrong then.
"""

import argparse
import contextlib
import io
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FLIP = "FLIP"  # of a process: {"rank", "after", "what", "seed"}
HOW = ("experiment=synthetic", "world.device=cpu", "track=[]", "train.eval_every=0", "train.log_every=1",
       "snapshot.every_seconds=0", "snapshot.hot_every_steps=0", "snapshot.keep=1000",
       "snapshot.asynchronous=false")  # fmt: skip
WHAT = ("weight", "weight", "moment", "record")
LIMIT = 400  # seconds for one attempt


def worker() -> None:
    """One process of torchrun's: trains, and flips its bit."""
    if text := os.environ.get(FLIP):
        plan = json.loads(text)
        if int(os.environ.get("RANK", "0")) == plan["rank"]:
            plant(plan)
    runpy.run_module("mingpt.train", run_name="__main__")


def plant(plan: dict[str, Any]) -> None:
    import torch

    import mingpt.train.loop as loop

    real, chooser = loop.train_step, random.Random(plan["seed"])

    def step(context: Any, step: int, batches: Any, graphs: Any = None) -> Any:
        stats = real(context, step, batches, graphs)
        if step + 1 == plan["after"]:
            state = context.state()["model" if plan["what"] == "weight" else "optimizer"]
            names = [n for n in sorted(state) if state[n].dtype == torch.float32 and state[n].numel() > 1]
            flat = state[chooser.choice(names)].view(-1).view(torch.int32)
            flat[chooser.randrange(len(flat))] ^= int(np.int32(np.uint32(1 << chooser.randrange(32)).astype(np.int32)))
        return stats

    loop.train_step = step


def attempt(folder: Path, world: int, last: int, decay: int, every: int, flip: str = "", kill_at: int = 0) -> None:
    """Train on to step `last`; or kill all processes at the line of step kill_at."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}")
    given = (*HOW, f"run.dir={folder}", f"train.max_steps={last}", f"schedule.decay_steps={decay}")
    process = subprocess.Popen(
        [sys.executable, *launcher, __file__, "--worker", *given, f"snapshot.every_steps={every}"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", FLIP: flip},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    said, killed = [], False
    assert process.stdout
    for line in process.stdout:
        said.append(line)
        if kill_at and not killed and line.startswith(f"step {kill_at:>{len(str(last))}}/"):
            os.killpg(process.pid, signal.SIGKILL)
            killed = True
    process.wait(LIMIT)
    if not killed and (process.returncode or kill_at):
        raise SystemExit("".join(said[-30:]))


def audited(folder: Path) -> list[dict[str, Any]]:
    from mingpt import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run("audit", [str(folder), "--json"])
    if code not in (0, 1):
        raise SystemExit(err.getvalue())
    found: list[dict[str, Any]] = json.loads(out.getvalue())["intervals"]
    assert (code == 1) == any(one["verdict"] == "FAIL" for one in found), code
    return found


def sound(folder: Path, steps: int, every: int, before: Path) -> list[tuple[int, int, int]]:
    """(attempt, world, last step of it that was kept) of a run of three attempts. before/N: as attempt N found it."""
    kept, start = [], 0
    for number, world in enumerate((1, 2, 3), 1):
        shutil.copytree(folder, before / str(number)) if folder.exists() else (before / str(number)).mkdir(parents=True)
        last = steps if number == 3 else steps * number // 3
        attempt(folder, world, steps, steps, every, kill_at=0 if number == 3 else last)
        start = max(int(p.name[5:]) for p in (folder / "snapshots").glob("step-*") if (p / "manifest.json").exists())
        kept.append((number, world, start))
    return kept


def same_everywhere(one: Path, other: Path) -> bool:
    """Whether all snapshots of `one` have the digests of `other`'s, and the newest attempts' traces the same bits."""
    from mingpt.observe.trace import read_trace
    from mingpt.snapshot.reader import read_manifest
    from mingpt.snapshot.store import Store

    stores, number = [Store(f"{folder}/snapshots") for folder in (one, other)], max(read_trace(str(one)))
    mine, theirs = (read_trace(str(folder))[number] for folder in (one, other))
    equal = all(len({read_manifest(s, step).digest for s in stores}) == 1 for step in stores[0].steps())
    return equal and mine.tobytes() == theirs[: len(mine)].tobytes()


def change_record(folder: Path, number: int, step: int, chooser: random.Random) -> None:
    from mingpt.observe.trace import RECORD

    (path,) = folder.glob(f"trace/attempt-{number:05d}-*.bin")
    records = np.fromfile(path, RECORD)
    (at,) = np.flatnonzero(records["step"] == step)
    records.view(np.uint8).reshape(-1, RECORD.itemsize)[at, 4 + chooser.randrange(16)] ^= 1 << chooser.randrange(8)
    records.tofile(path)


def corruptions(count: int, seed: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Plants `count` of them, in turns in attempts with 1, 2 and 3 processes, and audits each run."""
    whole, chooser, done = folder / "whole", random.Random(seed), 0
    kept = sound(whole, 24, 4, folder / "before")
    firsts = {number: before + 1 for (number, _, _), before in zip(kept, [0, *(k[2] for k in kept)], strict=False)}
    while done < count:
        number, world, last = kept[done % 3]
        what, after = WHAT[done % len(WHAT)], chooser.randrange(firsts[number], last + 1)
        run = folder / f"planted-{done}"
        shutil.rmtree(run, ignore_errors=True)
        plan = {"rank": chooser.randrange(world), "after": after, "what": what, "seed": chooser.random()}
        if what == "record":
            shutil.copytree(whole, run)
            change_record(run, number, after, chooser)
        else:
            shutil.copytree(folder / "before" / str(number), run)
            attempt(run, world, last, 24, 4, flip=json.dumps(plan))
            if same_everywhere(run, whole):
                yield {"without effect": True} | plan
                continue
        wrong = [one for one in audited(run) if one["verdict"] != "ok"]
        first = wrong[0] if wrong else {}
        why = first.get("why", "")
        # A flip after the last step of an interval is in its snapshot; otherwise the next step computes with it.
        shows = {"weight": [after + 1], "moment": [after + 1, after + 2], "record": [after]}[what]
        yield plan | {
            "attempt": number,
            "world": world,
            "found": bool(wrong),
            "attempt named": first.get("attempt") == number,
            "interval named": bool(wrong) and first["begin"] < after <= first["end"],
            "step named": (first.get("step") in shows and why.startswith(f"step {first['step']} "))
            or (bool(wrong) and after == first["end"] and f"after the gradient of step {after}" in why),
            "told": why,
            "tensors": first.get("tensors", [])[:3],
        }
        done += 1


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        del sys.argv[1]
        worker()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corruptions", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options, began = parser.parse_args(), time.perf_counter()
    summary: dict[str, Any] = {"seed": options.seed}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.steps:
            kept = sound(folder / "long", options.steps, 25, folder / "long-before")
            found = audited(folder / "long")
            summary["audited steps"] = sum(one["end"] - one["begin"] for one in found)
            summary["intervals"], summary["processes by attempt"] = len(found), [world for _, world, _ in kept]
            summary["false alarms"] = sum(one["verdict"] != "ok" for one in found)
            print(json.dumps(summary), flush=True)
        count = Counter[str]()
        for one in corruptions(options.corruptions, options.seed, folder):
            print(json.dumps(one), flush=True)
            count.update([key for key, value in one.items() if value is True])
            count["planted"] += "found" in one
    print(json.dumps(summary | dict(count) | {"seconds": round(time.perf_counter() - began)}, indent=1))


if __name__ == "__main__":
    main()
