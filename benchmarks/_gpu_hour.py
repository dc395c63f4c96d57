"""`benchmarks/gpu_hour.sh`: what is measured in the first hour on a GPU, one section after the other.

Each section has a time limit, and what it found is written before the next one begins: an hour that ends early, or a
section that fails, leaves the others' figures. A section that failed says so in the page.
"""

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARM = 5  # steps that compile and fill caches: no speed is taken from them
ROUNDS = 3  # exact, fast and nanoGPT, in turns: a GPU that heats up slows all of them alike


@dataclass(frozen=True)
class Scale:
    """How large the runs are. The tiny one is for a machine without a GPU, and measures nothing."""

    model: tuple[str, ...]
    steps: int
    micro: int
    microbatches: int
    profiled: int
    seconds: int

    def overrides(self) -> list[str]:
        batch = [f"batch.micro_size={self.micro}", f"batch.global_size={self.micro * self.microbatches}"]
        return ["data.kind=random", *self.model, *batch, "train.log_every=1", "train.eval_every=0"]


GPT2 = Scale(("model=gpt2", "precision=bf16", "train.compile=true"), 30, 8, 8, 20, 20)
TINY = Scale(("model=gpt-nano", "model.block_size=16", "precision=fp32"), 12, 2, 2, 3, 2)


class Hour:
    """Where the results go, and how commands are run. Raises CalledProcessError or TimeoutExpired of a command."""

    def __init__(self, out: Path, scale: Scale, nanogpt: Path) -> None:
        self.out, self.scale, self.nanogpt = out, scale, nanogpt
        self.results: dict[str, Any] = {}

    def command(self, log: str, *words: str, limit: float = 900) -> str:
        """Its stdout. Both of its outputs are in LOG.txt."""
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit, check=False
        )
        with (self.out / f"{log}.txt").open("a") as file:
            file.write(f"$ python {' '.join(words)}\n{done.stdout}{done.stderr}exit code {done.returncode}\n")
        done.check_returncode()
        return done.stdout

    def overrides(self, name: str, *more: str) -> list[str]:
        """The scale's, but for those that `more` gives otherwise."""
        given = {word.partition("=")[0] for word in more}
        usual = [word for word in self.scale.overrides() if word.partition("=")[0] not in given]
        return [*usual, f"run.dir={self.out}/runs/{name}", *more]

    def train(self, name: str, *more: str, processes: int = 1) -> list[dict[str, Any]]:
        """The metrics of all steps of a new run."""
        shutil.rmtree(self.out / "runs" / name, ignore_errors=True)
        launch = ("-m", "mingpt", "launch", f"--nproc-per-node={processes}")
        self.command(name, *launch, *self.overrides(name, *more))
        return self.rows(name)

    def rows(self, name: str) -> list[dict[str, Any]]:
        files = sorted((self.out / "runs" / name / "metrics").glob("*.jsonl"))
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [row for row in rows if "step_seconds" in row]

    def digest(self, name: str) -> str:
        return self.command(name, "-m", "mingpt", "snapshots", "digest", f"{self.out}/runs/{name}").strip()

    def section(self, name: str, measure: "Callable[[Hour], dict[str, Any]]") -> None:
        began = time.monotonic()
        try:
            result = measure(self)
        except Exception as e:  # told in the page; the next section has its own chance
            result = {"failed": f"{type(e).__name__}: {e}"[:500]}
        self.results[name] = result | {"seconds": round(time.monotonic() - began, 1)}
        print(f"{name}: {json.dumps(self.results[name])}", flush=True)
        (self.out / "results.json").write_text(json.dumps(self.results, indent=1) + "\n")
        (self.out / "README.md").write_text(page(self.results))


def machine(hour: Hour) -> dict[str, Any]:
    import torch

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    smi = shutil.which("nvidia-smi")
    query = ["--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    driver = subprocess.run([smi, *query], capture_output=True, text=True, check=False).stdout if smi else ""
    return {
        "commit": commit.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "gpus": gpus,
        "driver, power, clock": driver.strip(),
        "torch": torch.__version__,
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def selftest(hour: Hour) -> dict[str, Any]:
    command = ("-m", "mingpt", "selftest", "--compile", "--json", f"--seconds={hour.scale.seconds}")
    return {"report": json.loads(hour.command("selftest", *command).splitlines()[-1])}


def same_bits(hour: Hour) -> dict[str, Any]:
    """One step twice, and two processes on one GPU, which gloo joins: one digest."""
    digests = {}
    for name, processes, more in (
        ("first", 1, ()),
        ("again", 1, ()),
        ("two processes", 2, ("world.backend=gloo",)),
    ):
        run = f"bits-{name.replace(' ', '-')}"
        hour.train(run, "train.max_steps=2", *more, processes=processes)
        digests[name] = hour.digest(run)
    return {"digests": digests, "equal": len(set(digests.values())) == 1}


def speed(hour: Hour) -> dict[str, Any]:
    """Tokens a second after the first steps, by the median step; exact, fast and nanoGPT in turns."""
    from mingpt.observe.speed import flops_per_token

    tokens: dict[str, list[float]] = {}
    steps, batch = hour.scale.steps, hour.scale.micro * hour.scale.microbatches
    for _ in range(ROUNDS):
        for reduce in ("exact", "fast"):
            more = (f"train.max_steps={steps}", f"reduce={reduce}", "snapshot.every_seconds=0")
            rows = hour.train(f"speed-{reduce}", *more)[WARM:]
            seconds = statistics.median(row["step_seconds"] for row in rows)
            a_step = (rows[-1]["tokens_seen"] - rows[0]["tokens_seen"]) / (len(rows) - 1)
            tokens.setdefault(reduce, []).append(a_step / seconds)
        if hour.nanogpt.is_dir():
            words = (str(Path(__file__)), f"--one={hour.nanogpt}", *(["--tiny"] if hour.scale is TINY else []))
            tokens.setdefault("nanoGPT", []).append(float(hour.command("nanogpt", *words).split()[-1]))
    result: dict[str, Any] = {"microbatches of": hour.scale.micro, "a step": batch}
    result["tokens a second"] = {name: round(statistics.median(values)) for name, values in tokens.items()}
    for other in tokens.keys() - {"exact"}:
        pairs = zip(tokens["exact"], tokens[other], strict=True)
        result[f"exact / {other}"] = round(statistics.median(x / y for x, y in pairs), 3)
    utilization = [row["mfu"] for row in hour.rows("speed-exact")[WARM:] if "mfu" in row]
    if utilization:
        result["MFU, exact"] = round(statistics.median(utilization), 3)
    if hour.scale is GPT2:
        result["FLOP a token"] = flops_per_token(123_551_232, 12, 768, 1024)
    return result


def profile(hour: Hour) -> dict[str, Any]:
    """A trace for Perfetto: look for gaps between kernels in the last backward of a step."""
    end = WARM + hour.scale.profiled
    hour.train("profile", f"train.max_steps={end + 2}", f"profile.steps={WARM}:{end}", "snapshot.every_seconds=0")
    files = (hour.out / "runs" / "profile" / "profile").iterdir()
    return {"files": sorted(str(path.relative_to(hour.out)) for path in files)}


def kill(hour: Hour) -> dict[str, Any]:
    """kill -9, and the same command at once: the dead process may still have the GPU's memory."""
    name, last = "kill", hour.scale.steps
    more = (f"train.max_steps={last}", "snapshot.every_steps=5")
    hour.train("undisturbed", *more)
    shutil.rmtree(hour.out / "runs" / name, ignore_errors=True)
    words = [sys.executable, "-m", "mingpt", "launch", "--nproc-per-node=1", *hour.overrides(name, *more)]
    log = (hour.out / "kill-first.txt").open("w+")
    process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    limit = time.monotonic() + 900
    while not (hour.out / "runs" / name / "snapshots" / "step-000000005" / "manifest.json").exists():
        if time.monotonic() > limit or process.poll() is not None:
            raise RuntimeError("it did not come to step 5: see kill-first.txt")
        time.sleep(0.05)
    process.kill()  # the launcher; its workers end with it
    began = time.monotonic()
    hour.command(name, *words[1:])
    text = (hour.out / f"{name}.txt").read_text()
    start = re.findall(r"^start: .*$", text, re.M)
    equal = hour.digest(name) == hour.digest("undisturbed")
    return {"equal": equal, "start": start[-1:], "seconds to the end": round(time.monotonic() - began, 1)}


def stall(hour: Hour) -> dict[str, Any]:
    """How much longer a step takes in which a snapshot is copied. GPT-2 355M with AdamW's moments: 4.3 GB."""
    more = ["model=gpt2-medium", "batch.micro_size=4", "batch.global_size=16"] if hour.scale is GPT2 else []
    rows = hour.train("stall", *more, "train.max_steps=33", "snapshot.every_steps=10")
    seconds = {row["step"]: row["step_seconds"] for row in rows}
    usual = statistics.median(seconds[step] for step in range(6, 31) if step % 10 not in (0, 1))
    after = [max(seconds[step], seconds[step + 1]) - usual for step in (10, 20, 30)]
    size = sum(path.stat().st_size for path in (hour.out / "runs/stall/snapshots/step-000000030").iterdir())
    shutil.rmtree(hour.out / "runs/stall/snapshots")
    return {"bytes": size, "usual step": round(usual, 4), "longer by": [round(s, 4) for s in after]}


def page(results: dict[str, Any]) -> str:
    """The results as one table a section."""
    lines = ["# The first hour on this machine", ""]
    for name, result in results.items():
        lines += [f"## {name}", "", "| what | figure |", "|---|---|"]
        lines += [f"| {what} | {json.dumps(value).replace('|', '/')[:2000]} |" for what, value in result.items()]
        lines.append("")
    return "\n".join(lines)


def nanogpt(checkout: Path, scale: Scale) -> float:
    """Tokens a second of nanoGPT's own model, optimizer and loop, with this shape and random tokens."""
    sys.path.insert(0, str(checkout))
    import torch
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    shape = {"block_size": 1024} if scale is GPT2 else {"block_size": 16, "n_layer": 3, "n_head": 3, "n_embd": 48}
    model = GPT(GPTConfig(vocab_size=50304, dropout=0.0, bias=True, **shape)).to(device)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device)
    compute = torch.compile(model) if scale is GPT2 else model
    tokens = torch.randint(50257, (scale.micro, shape["block_size"] + 1), device=device)
    times = []
    for _ in range(scale.steps):
        began = time.perf_counter()
        for _ in range(scale.microbatches):
            with torch.autocast(device, torch.bfloat16, enabled=scale is GPT2):
                _, loss = compute(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            (loss / scale.microbatches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return scale.micro * scale.microbatches * shape["block_size"] / statistics.median(times[WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "gpu_hour", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU: does every section work?")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)  # nanoGPT, in a process of its own
    options = parser.parse_args()
    scale = TINY if options.tiny else GPT2
    if options.one:
        print(nanogpt(options.one, scale))
        return
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    hour = Hour(out, scale, out / "nanoGPT")
    for measure in (machine, selftest, same_bits, speed, profile, kill, stall):
        hour.section(measure.__name__.replace("_", " "), measure)
    failed = [name for name, result in hour.results.items() if "failed" in result]
    print(f"{out}/README.md, results.json{'; these failed: ' + ', '.join(failed) if failed else ''}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
