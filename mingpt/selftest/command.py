"""`mingpt selftest`: does this machine compute right, and equal to itself under load? How a rented one is tried."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from mingpt.command import Unfit, command
from mingpt.console import say
from mingpt.errors import TransientError, UserError
from mingpt.selftest.__main__ import parser
from mingpt.selftest.known import compare, row
from mingpt.selftest.result import Result
from mingpt.selftest.runs import Runs
from mingpt.storage import place

START_SECONDS = 600  # for imports and, with --compile, the compiler; beside --seconds


def busy(device: str, count: int, options: Namespace) -> list[dict[str, Any]]:
    """The answers of `count` processes of bits.py that compute at the same time."""
    names = ["cpu"] * count if device == "cpu" else [f"cuda:{i}" for i in range(count)]
    kind = "compiled" if options.compile else "eager"
    arguments = ["-m", "mingpt.selftest.bits"]
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments, name, str(options.seconds), kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    answers = []
    try:
        for name, process in zip(names, processes, strict=True):
            output, errors = process.communicate(timeout=options.seconds + START_SECONDS)
            if process.returncode:
                raise TransientError(f"a step on {name} ended with exit code {process.returncode}: {errors[-500:]}")
            answers.append(json.loads(output.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        raise TransientError(f"{name} does not answer after {options.seconds + START_SECONDS:.0f} s") from None
    finally:
        for process in processes:
            process.kill()
    return answers


def judge(answers: list[dict[str, Any]]) -> Iterator[Result]:
    """A line for each case: one digest in all processes and repetitions, or several."""
    for name in answers[0]["digests"]:
        counts = [answer["digests"].get(name, {}) for answer in answers]
        digests = sorted({digest for count in counts for digest in count})
        times = sum(n for count in counts for n in count.values())
        if len(digests) == 1:
            yield Result(name, True, f"{digests[0]}, {times} times")
            continue
        by_process = "; ".join(
            f"process {i}: {', '.join(f'{d} {n} times' for d, n in count.items())}" for i, count in enumerate(counts)
        )
        yield Result(name, False, f"{len(digests)} different results: {by_process}")
    for name, why in answers[0]["absent"].items():
        yield Result(name, None, f"not here: {why}")


def devices(wanted: str | None) -> tuple[str, int]:
    """The kind of device, and how many processes compute at a time."""
    import torch

    gpus = torch.cuda.device_count()
    if wanted == "cuda" and not gpus:
        raise UserError("--device cuda: torch finds no GPU here; nvidia-smi shows whether the driver does")
    if wanted != "cpu" and gpus:
        return "cuda", gpus
    return "cpu", len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_all(device: str, count: int, options: Namespace, show: Any) -> tuple[list[Result], dict[str, Any]]:
    """All results, and this machine's row. show: called with each result when it is there."""
    results: list[Result] = []

    def add(found: Iterator[Result]) -> None:
        for result in found:
            results.append(result)
            show(result)

    answers = busy(device, count, options)
    about, run = answers[0]["about"], ""
    add(iter([Result("this machine", None, ", ".join(f"{k} {v}" for k, v in about.items() if v and k != "peak"))]))
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    add(iter([Result("C compiler, for train.compile", None, compiler or "none")]))
    add(judge(answers))
    if not options.quick:
        most = count if device == "cuda" else max(3, count)
        with (
            tempfile.TemporaryDirectory(prefix="mingpt-selftest-") as folder,
            closing(Runs(Path(folder), device, most)) as runs,
        ):
            add(runs.checks())
            runs.most = count
            add(runs.speed(about["peak"]))
            run = runs.digest
    mine = row(about, {name: next(iter(found)) for name, found in answers[0]["digests"].items()}, run)
    add(iter([compare(mine)]))
    return results, mine


def end_as_asked() -> None:
    """On SIGTERM, and on SIGHUP without nohup, leave nothing behind: no run that trains on, no folder."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


@command("stopped")
def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    end_as_asked()
    if not 0 <= options.seconds < 86400:
        raise UserError(f"--seconds {options.seconds:g}: give 0 to 86400")
    if options.compile and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        raise UserError("--compile: there is no C compiler here; install gcc")
    if options.out:
        with place("--out", str(options.out)):  # before minutes of work
            options.out.open("a").close()
    device, count = devices(options.device)
    results, mine = check_all(
        device, count, options, (lambda _: None) if options.json else lambda result: say(str(result))
    )
    if options.out:
        with place("--out", str(options.out)):
            options.out.write_text(json.dumps(mine, indent=1) + "\n")
    failed = [result.what for result in results if result.ok is False]
    if options.json:
        say(json.dumps({"ok": not failed, "results": [vars(result) for result in results], "row": mine}))
    if failed:
        raise Unfit(f"this machine does not compute as it should: {'; '.join(failed)}")
    if not options.json:
        say("all checks passed")
    return 0
