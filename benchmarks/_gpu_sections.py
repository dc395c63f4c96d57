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

from _gpu_runs import (
    ALONE,
    BESIDE,
    COMPILE,
    GRAPHS,
    TINY,
    Jobs,
    compare,
    compiled,
    digest,
    failed,
    missing,
    run_name,
    said,
    without_graph,
)  # fmt: skip

if TYPE_CHECKING:
    from _gpu_check import Check

HERE = Path(__file__).parent
RUN_SECONDS = 90.0  # of one run whose speed is measured: if it hangs, the others have their time
WARM = 6  # steps that compile, capture and fill caches: no speed is taken from them


def machine(check: "Check") -> None:
    import torch

    figures: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": told_by("git", "rev-parse", "HEAD"),
        "torch": torch.__version__,
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    if torch.cuda.is_available():
        query = ["--query-gpu=driver_version,power.limit,clocks.max.sm,memory.total", "--format=csv,noheader"]
        figures |= {
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "driver, power, clock, memory": told_by("nvidia-smi", *query),
            "bf16 product, TFLOP/s": product(),
        }
    else:
        figures["no GPU"] = "tiny shapes: the figures below measure nothing"
    check.found("machine", "here", **figures)


def told_by(program: str, *words: str) -> str:
    """What it prints; nothing if this machine has no such program."""
    path = shutil.which(program)
    return subprocess.run([path, *words], cwd=HERE, capture_output=True, text=True).stdout.strip() if path else ""


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
    """Where the host is slower than the GPU: what CUDA graphs are for."""
    speeds(check, check.scale.micros[0])


def speed_large(check: "Check") -> None:
    speeds(check, check.scale.micros[1])


def speeds(check: "Check", micro: int) -> None:
    """Tokens a second: exact, with graphs and without, and whether these have the same bits; and nanoGPT's loop."""
    exact: dict[str, float] = {}
    for name, words in GRAPHS.items():
        exact[name] = exact_speed(check, micro, name, [*words, *compiled(check)])
    theirs = loop_speed(check, micro)
    figures: dict[str, Any] = {}
    for name, ours in exact.items():
        if ours and theirs:
            figures[f"exact, {name} / loop"] = round(ours / theirs, 3)
    digests = [digest(check, speed_run(micro, name)) for name in GRAPHS]
    if all(digests):
        figures["equal"] = digests[0] == digests[1]
    check.found("speed", f"micro {micro}: compared", **figures)


def speed_run(micro: int, name: str) -> str:
    return f"speed-{micro}-{name.replace(' ', '-')}"


def exact_speed(check: "Check", micro: int, name: str, words: list[str]) -> float:
    """Tokens a second of the trainer, by the median step; 0 if there was no time."""
    run = speed_run(micro, name)
    steps = f"train.max_steps={check.scale.steps}"
    code = check.train(run, f"batch.micro_size={micro}", steps, *words, limit=RUN_SECONDS)
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
    lacks = without_graph(check, run, words) if code == 0 else {}
    check.found("speed", title, code=code, **figures, said=said(check, run), **failed(code), **lacks)
    return tokens


def loop_speed(check: "Check", micro: int) -> float:
    """Tokens a second of nanoGPT's loop, in a process of its own; 0 if there was no time."""
    name, theirs, scale = f"speed-{micro}-loop", check.out / "nanoGPT", check.scale
    words = [f"{HERE}/_gpu_loop.py", f"--micro={micro}", f"--batch={scale.batch}", f"--block={scale.block}"]
    words += [f"--steps={scale.steps}", f"--warm={WARM}", *(["--tiny"] if not scale.compile else [])]
    process = check.start(name, *words, *([f"--nanogpt={theirs}"] if theirs.is_dir() else []))
    code = check.wait(process, RUN_SECONDS)
    title = f"micro {micro}: {'nanoGPT' if theirs.is_dir() else 'a bare loop as nanoGPT has it'}"
    if code != 0:
        check.found("speed", title, code=code, tail=check.tail(name), **failed(code))
        return 0.0
    figures = json.loads([line for line in check.log(name).splitlines() if line.startswith("{")][-1])
    check.found("speed", title, **figures)
    return float(figures["tokens/s"])


# --- bits ---


def smaller(check: "Check") -> list[str]:
    """Eight microbatches, of which two processes replay three each."""
    return [f"batch.global_size={check.scale.batch // 2}", f"batch.micro_size={max(1, check.scale.micros[0] // 2)}"]


def bits(check: "Check") -> None:
    """One digest for each kind of run, for any number of processes, with graphs or without; several runs at once."""
    short = ["train.max_steps=3", *smaller(check)]
    kinds: dict[str, list[str]] = {"eager": [], "compiled": [COMPILE], "dropout": ["model.dropout=0.1"]}
    # First the undisturbed runs of the section `kill`, which compares with them: they are the longest.
    jobs: Jobs = {f"undisturbed, {kind}": (words, 1, ALONE) for kind, words in to_be_killed(check).items()}
    for kind, words in kinds.items():
        if check.scale.compile or kind == "eager":
            jobs |= {f"{kind}, {name}": ([*short, *words, *more], 1, ALONE) for name, more in GRAPHS.items()}
            shared = [*short, *words, *GRAPHS["graphs on"], "world.backend=gloo"]
            jobs |= {f"{kind}, {n} processes": (shared, n, BESIDE) for n in ((2, 3) if kind == "eager" else (2,))}
    compare(check, "bits", jobs)


def models(check: "Check") -> None:
    """What else a graph may hold: precisions, optimizers, recomputation, masks; small models, with graphs and not."""
    gpt, modern = ("model=gpt-nano", "model.block_size=64"), ("model=modern-nano", "model.block_size=64")
    chat = check.out / "chat.jsonl"
    turns = ({"prompt": f"What is {n} and {n}?", "answer": f"It is {n + n}."} for n in range(200))
    chat.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    talk = ("data=chat", f"data.path={chat}", f"data.cache_dir={check.out}/cache", "data.tokens=byte")
    kinds: dict[str, tuple[str, ...]] = {
        "grouped queries and Muon": (*modern, "model.n_kv_head=1", "precision=bf16", "optimizer=muon"),
        "fp16": (*gpt, "precision=fp16"),
        "dropout in fp32": (*gpt, "precision=fp32", "model.dropout=0.1"),
        "recomputed": (*gpt, "precision=bf16", "model.dropout=0", "train.recompute=block"),
        "loss rows": (*gpt, "precision=bf16", "train.loss_rows=100"),
        "masks and weights": (*gpt, "model.block_size=96", "precision=bf16", *talk),
        "a batch that grows": (*gpt, "precision=bf16", "batch.micro_size=8", "batch.double_at=[2]"),
    }
    if check.scale.compile:
        kinds["compiled grouped queries"] = (*modern, "model.n_kv_head=1", "precision=bf16", COMPILE)
        kinds["compiled dropout"] = (*gpt, "precision=bf16", "model.dropout=0.1", COMPILE)
        kinds["compiled loss rows"] = (*gpt, "precision=bf16", "train.loss_rows=100", COMPILE)
        kinds["tf32"] = (*gpt, "precision=tf32")
    short = ("train.max_steps=3", "batch.global_size=16", "batch.micro_size=4")
    jobs: Jobs = {}
    for kind, words in kinds.items():
        given = {word.partition("=")[0] for word in words}
        usual = [word for word in short if word.partition("=")[0] not in given]
        jobs |= {f"{kind}, {name}": ([*usual, *words, *more], 1, TINY) for name, more in GRAPHS.items()}
    compare(check, "models", jobs)


# --- kill ---


def to_be_killed(check: "Check") -> dict[str, list[str]]:
    words = ["train.max_steps=14", *smaller(check), "snapshot.every_steps=4", "snapshot.asynchronous=false"]
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
        a_step = until(check, process, newest_step, second)
        to_a_step = (
            round(time.monotonic() - began, 2) if a_step else None
        )  # None: its time was over, which is no time to a step
        a_new_one = until(check, process, partial(is_beyond, last), second)
        to_a_new_one = round(time.monotonic() - began, 2) if a_new_one else None
        code = check.wait(process)
        ours, theirs = digest(check, second), digest(check, run_name(f"undisturbed, {kind}"))
        equal = ours == theirs if ours and theirs else None
        figures: dict[str, Any] = {"equal": equal, "digest": ours, "undisturbed": theirs}
        figures |= {"seconds to a step": to_a_step, "to a new one": to_a_new_one}
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
    """One step under torch's profiler, with what users get by default, and without graphs.

    NVIDIA's library may give wrong times of a replay's kernels (kineto#1165): compare them with those without.
    """
    for name, file, words in (("a step", "kernels.txt", []), ("graphs off", "kernels-off.txt", GRAPHS["graphs off"])):
        if check.left() > 5:
            profile_one(check, name, file, words)


def profile_one(check: "Check", name: str, file: str, words: list[str]) -> None:
    run = f"profile-{file.partition('.')[0]}"
    code = check.train(run, "train.max_steps=12", "profile.steps=8:9", *words, *compiled(check))
    traces = sorted((check.out / "runs" / run / "profile").glob("*.json*"), key=lambda path: path.stat().st_size)
    check.forget(run)
    if not traces:
        return check.found("profile", name, code=code, tail=check.tail(run), **missing(code, "trace"))
    raw = traces[-1].read_bytes()
    events = json.loads(gzip.decompress(raw) if traces[-1].suffix == ".gz" else raw)["traceEvents"]
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    host = [e for e in events if e.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")]
    text = f"On the device: ms, count, name\n{table(device)}\nOn the host (inclusive): ms, count, name\n{table(host)}"
    (check.out / file).write_text(text)
    figures = {"kernels": len(device), "busy ms": round(sum(e["dur"] for e in device) / 1000, 1)}
    if device:
        end = max(e["ts"] + e["dur"] for e in device)
        figures["span ms"] = round((end - min(e["ts"] for e in device)) / 1000, 1)
    check.found("profile", name, code=code, **figures, **failed(code))


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
    (machine, 30), (speed, 180), (bits, 130), (models, 70), (speed_large, 130), (kill, 110), (profile, 80), (stall, 70),
)  # fmt: skip
