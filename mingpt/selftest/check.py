"""`mingpt selftest`: does this machine compute right, and equal to itself under load?

Repeats known steps with all cores or GPUs busy, and compares their bits with each other and with known machines'. It
needs no data and writes nothing.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mingpt.cli.command import Unfit
from mingpt.cli.console import say, say_json
from mingpt.errors import TransientError, UserError
from mingpt.world.env import START
from mingpt.world.platforms import cores

Answer = dict[str, Any]  # of one process

START_SECONDS = 600  # beside --seconds and --limit: for imports, and a case that has begun when the limit is over
TABLE = Path(__file__).with_name("known.json")
MARKS = {True: "ok  ", False: "FAIL", None: "    "}
Result = tuple[str, bool | None, str]  # what; whether it is right, None if it can't be wrong; what was found


def busy(names: list[str], *options: str, limit: float) -> list[Answer]:
    """The answers of processes that compute at the same time, one on each device. The first shows how far it is."""

    def one(number: int, name: str) -> Answer:
        command = [sys.executable, START, "mingpt.selftest.bits", *options, str(os.getpid()), name]
        try:
            shown = subprocess.PIPE if number else None  # as stderr
            ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=shown, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            raise TransientError(f"{name} does not answer after {limit:.0f} s") from None
        if ended.returncode:
            raise TransientError(
                f"a step on {name} ended with exit code {ended.returncode}: {(ended.stderr or 'see above')[-500:]}"
            )
        answer: Answer = json.loads(ended.stdout.splitlines()[-1])
        return answer

    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(one, range(len(names)), names))


def judge(answers: list[Answer]) -> list[Result]:
    """For each case: one digest in all processes and repetitions, or several."""
    results: list[Result] = []
    for name in answers[0]["digests"]:
        # By process: how often it had each digest; nothing if its time was over.
        counts = [answer["digests"].get(name, {}) for answer in answers]
        digests = set[str]()
        repetitions = 0
        for count in counts:
            digests |= count.keys()
            repetitions += sum(count.values())
        same = len(digests) == 1
        found = ", ".join(digests) if same else f"different results, by process: {counts}"
        if repetitions == 1:  # the limit was over: one digest alone says nothing
            results.append((name, None, f"{found}, computed once"))
        else:
            results.append((name, same, found))
    return results + [(name, None, why) for name, why in answers[0]["absent"].items()]


def compare(mine: Answer, table: Path = TABLE) -> Result:
    """With the row of the same kind, as far as both have the same cases."""
    for known in json.loads(table.read_text()):
        if {**known, "digests": mine["digests"]} != mine:
            continue
        # A case that one of the two does not have says nothing.
        both = mine["digests"].keys() & known["digests"].keys()
        other = [case for case in mine["digests"] if case in both and known["digests"][case] != mine["digests"][case]]
        return "known machines", not other, f"others than here: {', '.join(other)}" if other else "the same as here"
    return "known machines", None, "none is of this kind"


def devices(wanted: str | None) -> list[str]:
    """Those that compute at a time."""
    import torch  # takes seconds: mistakes in the options come before them

    gpus = torch.cuda.device_count()
    if wanted == "cuda" and not gpus:
        raise UserError("--device cuda: torch finds no GPU here; nvidia-smi shows whether the driver does")
    if wanted != "cpu" and gpus:
        return [f"cuda:{i}" for i in range(gpus)]
    return ["cpu"] * cores()


def check(options: Namespace) -> int:
    times = options.seconds, options.limit
    if min(times) < 0 or not sum(times) < 86400:
        raise UserError("--seconds and --limit: give numbers from 0, together below 86400")
    arguments = map(str, (*times, options.compile))
    answers = busy(devices(options.device), *arguments, limit=sum(times) + START_SECONDS)
    machine = answers[0]["machine"]
    mine = {**machine, "digests": {case: min(found) for case, found in answers[0]["digests"].items()}}
    about = ", ".join(f"{key} {value}" for key, value in machine.items() if value)
    results = [("this machine", None, about), *judge(answers), compare(mine)]
    failed = [what for what, ok, _ in results if ok is False]
    if options.json:
        found = [{"what": what, "ok": ok, "found": text} for what, ok, text in results]
        say_json({"ok": not failed, "results": found, "row": mine})
    else:
        say("\n".join([f"{MARKS[ok]}  {what}: {text}" for what, ok, text in results]))
    if failed:
        raise Unfit(f"this machine does not compute as it should: {'; '.join(failed)}")
    return 0
