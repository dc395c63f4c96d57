"""The sections of `gpu_check.sh`: each asks for runs and says what it found. None waits longer than its time."""

import gzip
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _gpu_check import Check

HERE = Path(__file__).parent
WARM = 6  # steps that compile, capture and fill caches: no speed is taken from them
COMPILE = "train.compile=true"


# What is compared: microbatches as CUDA graphs, and not. A run says by GRAPH that it has one.
GRAPHS = {"graphs on": ["train.cuda_graphs=true"], "graphs off": ["train.cuda_graphs=false"]}
GRAPH = "train.cuda_graphs: a microbatch is one CUDA graph"


def compiled(check: "Check") -> list[str]:
    return [COMPILE] if check.scale.compile else []


def machine(check: "Check") -> None:
    import torch

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False).stdout
    figures: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.strip(),
        "torch": torch.__version__,
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    if torch.cuda.is_available():
        query = ["--query-gpu=driver_version,power.limit,clocks.max.sm,memory.total", "--format=csv,noheader"]
        smi = shutil.which("nvidia-smi")
        told = subprocess.run([smi, *query], capture_output=True, text=True, check=False).stdout if smi else ""
        figures |= {
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "driver, power, clock, memory": told.strip(),
            "bf16 product, TFLOP/s": product(),
        }
    else:
        figures["no GPU"] = "tiny shapes: the figures below measure nothing"
    check.found("machine", "here", **figures)


def product() -> int:
    """TFLOP/s of the GPU's own matrix product in bf16: what all else is to be compared with."""
    import torch

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    for _ in range(3):
        a @ b
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        a @ b
    end.record()
    torch.cuda.synchronize()
    tflops = round(2 * 8192**3 * 10 / start.elapsed_time(end) / 1e9)
    del a, b
    torch.cuda.empty_cache()  # the runs need the memory
    return tflops


# --- speed ---


def speed(check: "Check") -> None:
    """Tokens a second: exact, and nanoGPT's loop, at both sizes of a microbatch, the smaller one first."""
    for micro in check.scale.micros:
        exact: dict[str, float] = {}
        for name, words in GRAPHS.items():
            exact[name] = exact_speed(check, micro, name, [*words, *compiled(check)])
        theirs = loop_speed(check, micro)
        ratios: dict[str, Any] = {}
        for name, ours in exact.items():
            if ours and theirs:
                ratios[f"exact, {name} / loop"] = round(ours / theirs, 3)
        check.found("speed", f"micro {micro}: ratios", **ratios)


def exact_speed(check: "Check", micro: int, name: str, words: list[str]) -> float:
    """Tokens a second of the trainer, by the median step; 0 if there was no time."""
    run = f"speed-{micro}-{name.replace(' ', '-')}"
    steps = f"train.max_steps={check.scale.steps}"
    code = check.train(run, f"batch.micro_size={micro}", steps, *words)
    rows = check.rows(run)[WARM:]
    check.forget(run)
    title = f"micro {micro}: exact, {name}"
    if len(rows) < 3:
        check.found("speed", title, code=code, steps=len(rows), tail=check.tail(run), **missing(code, "three steps"))
        return 0.0
    seconds = statistics.median(row["step_seconds"] for row in rows)
    tokens = check.scale.batch * check.scale.block / seconds
    figures = {"tokens/s": round(tokens), "ms a step": round(seconds * 1000, 1)}
    figures |= {"peak GB": round(rows[-1]["peak_memory"] / 1e9, 2), "mfu": rows[-1].get("mfu")}
    said = re.findall(r"^train\.cuda_graphs: .*$", check.log(run), re.M)
    check.found("speed", title, code=code, **figures, said=said[:3], **failed(code))
    return tokens


def loop_speed(check: "Check", micro: int) -> float:
    """Tokens a second of nanoGPT's loop, in a process of its own; 0 if there was no time."""
    name, theirs, scale = f"speed-{micro}-loop", check.out / "nanoGPT", check.scale
    words = [f"{HERE}/_gpu_loop.py", f"--micro={micro}", f"--batch={scale.batch}", f"--block={scale.block}"]
    words += [f"--steps={scale.steps}", f"--warm={WARM}", *(["--tiny"] if not scale.compile else [])]
    code = check.wait(check.start(name, *words, *([f"--nanogpt={theirs}"] if theirs.is_dir() else [])))
    title = f"micro {micro}: {'nanoGPT' if theirs.is_dir() else 'a bare loop as nanoGPT has it'}"
    if code != 0:
        check.found("speed", title, code=code, tail=check.tail(name), **failed(code))
        return 0.0
    figures = json.loads(check.log(name).splitlines()[-1])
    check.found("speed", title, **figures)
    return float(figures["tokens/s"])


def failed(code: int | None) -> dict[str, str]:
    """A mark in the results; a run that had no time (None) has not failed."""
    return {} if code in (0, None) else {"failed": f"exit code {code}"}


def missing(code: int | None, what: str) -> dict[str, str]:
    return {} if code is None else {"failed": f"exit code {code}, and no {what}"}


# --- bits ---


def bits(check: "Check") -> None:
    """One digest for each kind of run, for any number of processes, with graphs or without; several runs at once."""
    short = ["train.max_steps=3", f"batch.global_size={check.scale.batch // 2}"]
    kinds: dict[str, list[str]] = {"eager": [], "compiled": [COMPILE], "dropout": ["model.dropout=0.1"]}
    # First the undisturbed runs of the section `kill`, which compares with them: they are the longest.
    jobs = {f"undisturbed, {kind}": (words, 1) for kind, words in to_be_killed(check).items()}
    for kind, words in kinds.items():
        if check.scale.compile or kind == "eager":
            jobs |= {f"{kind}, {name}": ([*short, *words, *more], 1) for name, more in GRAPHS.items()}
            jobs[f"{kind}, 2 processes"] = ([*short, *words, *GRAPHS["graphs on"], "world.backend=gloo"], 2)
        if kind == "eager":
            jobs["eager, 3 processes"] = ([*short, *GRAPHS["graphs on"], "world.backend=gloo"], 3)
    codes = run_all(check, jobs)
    for kind in kinds:
        names = [name for name in jobs if name.startswith(f"{kind}, ")]
        digests = {name.partition(", ")[2]: digest(check, run_name(name)) for name in names}
        there = {value for value in digests.values() if value}
        if digests:
            wrong = [f"{name}: {codes.get(name)} {check.tail(run_name(name))}" for name in names if codes.get(name)]
            equal = None if None in digests.values() else len(there) == 1
            replayed = [name.partition(", ")[2] for name in names if GRAPH in check.log(run_name(name))]
            figures = {"digests": digests, "had a graph": replayed, **({"failed": wrong} if wrong else {})}
            check.found("bits", kind, equal=equal, **figures)


def run_name(job: str) -> str:
    return "bits-" + re.sub(r"\W+", "-", job)


def run_all(check: "Check", jobs: dict[str, tuple[list[str], int]]) -> dict[str, int | None]:
    """The exit codes of runs that share the GPU, as many at a time as its memory (or two cores) has room for."""
    room, waiting, codes = places(), list(jobs), dict[str, int | None]()
    running: dict[str, subprocess.Popen[bytes]] = {}
    while (waiting or running) and check.left() > 0:
        for name in [name for name, process in running.items() if process.poll() is not None]:
            codes[name] = running.pop(name).returncode
            if not name.startswith("undisturbed"):
                check.forget(run_name(name))
        taken = sum(jobs[name][1] for name in running)
        if waiting and (not running or taken + jobs[waiting[0]][1] <= room):
            name = waiting.pop(0)
            words, processes = jobs[name]
            running[name] = check.start(run_name(name), *check.launch(run_name(name), *words, processes=processes))
        time.sleep(0.1)
    for name, process in running.items():
        check.kill(process)
        codes[name] = None
    return codes


def places() -> int:
    """Processes of GPT-2 that fit on the GPU at once: 14 GB each."""
    import torch

    memory = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0
    return max(1, min(9, int(memory / 14e9))) if memory else 2


def digest(check: "Check", name: str) -> str | None:
    """Of the last snapshot, by the run's last line; None if it did not end."""
    found = re.search(r"^finished: step \d+, digest (\w+)", check.log(name), re.M)
    return found and found[1][:16]


# --- kill ---


def to_be_killed(check: "Check") -> dict[str, list[str]]:
    words = ["train.max_steps=14", f"batch.global_size={check.scale.batch // 2}"]
    words += ["snapshot.every_steps=4", "snapshot.asynchronous=false"]
    return {"eager": words} | ({"compiled": [*words, COMPILE]} if check.scale.compile else {})


def kill(check: "Check") -> None:
    """kill -9 of the launcher after a snapshot, and the same command at once: its dead workers may hold the GPU."""
    for kind, words in to_be_killed(check).items():
        first, second = f"kill-{kind}-first", f"kill-{kind}"
        launch = check.launch(f"kill-{kind}", *words)
        process = check.start(first, *launch)
        stored = until(check, process, partial(re.search, "^step 4: snapshot", flags=re.M), first)
        process.kill()  # the launcher alone: its workers end when it is gone
        process.wait()
        if not stored:
            why = {"failed": "it ended before step 4"} if check.left() > 0 else {}
            check.found("kill", kind, tail=check.tail(first), **why)
            continue
        began, last = time.monotonic(), newest_step(check.log(first))
        process = check.start(second, *launch)
        until(check, process, newest_step, second)
        to_a_step = time.monotonic() - began
        until(check, process, partial(is_beyond, last), second)
        to_a_new_one = time.monotonic() - began
        code = check.wait(process)
        ours, theirs = digest(check, second), digest(check, run_name(f"undisturbed, {kind}"))
        equal = ours == theirs if ours and theirs else None
        figures: dict[str, Any] = {"equal": equal, "digest": ours, "undisturbed": theirs}
        figures |= {"seconds to a step": round(to_a_step, 2), "to a new one": round(to_a_new_one, 2)}
        check.found("kill", kind, code=code, **figures, start=start_line(check, second), **failed(code))
        check.forget(second)
        check.forget(run_name(f"undisturbed, {kind}"))


def newest_step(log: str) -> int:
    """The number of the last step that a log tells of; 0: of none."""
    return max(map(int, re.findall(r"^step +(\d+)/", log, re.M)), default=0)


def is_beyond(step: int, log: str) -> bool:
    return newest_step(log) > step


def until(check: "Check", process: "subprocess.Popen[bytes]", happened: Callable[[str], Any], log: str) -> bool:
    """Wait until this is true of the log; False if the process has ended before, or the section's time is over."""
    while check.left() > 0:
        ended = process.poll() is not None
        if happened(check.log(log)):
            return True
        if ended:
            return False
        time.sleep(0.02)
    return False


# --- profile, stall, start ---


def profile(check: "Check") -> None:
    """One step under torch's profiler, with what users get by default: kernels.txt, and the trace for Perfetto."""
    code = check.train("profile", "train.max_steps=12", "profile.steps=8:9", *compiled(check))
    traces = sorted((check.out / "runs/profile/profile").glob("*.json*"), key=lambda path: path.stat().st_size)
    check.forget("profile")
    if not traces:
        return check.found("profile", "a step", code=code, tail=check.tail("profile"), **missing(code, "trace"))
    raw = traces[-1].read_bytes()
    events = json.loads(gzip.decompress(raw) if traces[-1].suffix == ".gz" else raw)["traceEvents"]
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    host = [e for e in events if e.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")]
    text = f"On the device: ms, count, name\n{table(device)}\nOn the host (inclusive): ms, count, name\n{table(host)}"
    (check.out / "kernels.txt").write_text(text)
    figures = {"kernels": len(device), "busy ms": round(sum(e["dur"] for e in device) / 1000, 1)}
    if device:
        end = max(e["ts"] + e["dur"] for e in device)
        figures["span ms"] = round((end - min(e["ts"] for e in device)) / 1000, 1)
    check.found("profile", "a step", code=code, **figures, **failed(code))


def table(events: list[dict[str, Any]]) -> str:
    """Events by name, the longest sums first."""
    sums: dict[str, tuple[float, int]] = {}
    for event in events:
        total, count = sums.get(event["name"][:100], (0.0, 0))
        sums[event["name"][:100]] = total + event.get("dur", 0) / 1000, count + 1
    longest = sorted(sums.items(), key=lambda item: -item[1][0])[:60]
    return "".join(f"{total:8.2f} {count:6d}  {name}\n" for name, (total, count) in longest)


def stall(check: "Check") -> None:
    """Whether a step is longer than its neighbours while a snapshot of GBs is copied and written."""
    words = ["train.max_steps=28", "snapshot.every_steps=9", "snapshot.keep=1", "batch.micro_size=4"]
    words += [f"batch.global_size={check.scale.batch // 4}"] if check.scale.compile else []
    code = check.train("stall", *words, *compiled(check), model=check.scale.large)
    seconds = {row["step"]: row["step_seconds"] for row in check.rows("stall") if row["step"] > WARM}
    written = re.findall(r"^step \d+: snapshot .*$", check.log("stall"), re.M)
    check.forget("stall")
    if len(seconds) < 10:
        return check.found("stall", "steps", code=code, tail=check.tail("stall"), **missing(code, "ten steps"))
    usual = statistics.median(seconds.values())
    beside = {step: round(s, 4) for step, s in seconds.items() if step % 9 in (0, 1, 2)}
    figures = {"usual s": round(usual, 4), "longest s": round(max(seconds.values()), 4), "around snapshots": beside}
    check.found("stall", "steps", code=code, **figures, written=written[:4], **failed(code))


def start_line(check: "Check", name: str) -> str:
    found = re.search(r"^start: (.*)$", check.log(name), re.M)
    return found[1] if found else ""


def start(check: "Check") -> None:
    """What the runs that were alone said of their starts; the first compiled one found no kernels in the cache."""
    logs = sorted((check.out / "logs").glob("*.txt"), key=lambda path: path.stat().st_mtime)
    alone = [path.stem for path in logs if path.stem.startswith(("speed-", "kill-", "profile", "stall"))]
    for name in alone:
        if line := start_line(check, name):
            check.found("start", name, phases=line)


# In order of worth, and the most seconds that each may take.
SECTIONS: tuple[tuple[Callable[["Check"], None], float], ...] = (
    (machine, 30), (speed, 210), (bits, 130), (kill, 110), (profile, 60), (stall, 70),
)  # fmt: skip
