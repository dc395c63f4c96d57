"""What the sections of `gpu_check.sh` share: runs that share the GPU, what a run said of itself, marks of failure."""

import os
import re
import subprocess
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _gpu_check import Check

COMPILE = "train.compile=true"


# What is compared: microbatches as CUDA graphs, and not. A run says by GRAPH that it has one.
GRAPHS = {"graphs on": ["train.cuda_graphs=true"], "graphs off": ["train.cuda_graphs=false"]}
GRAPH = "train.cuda_graphs: a microbatch is one CUDA graph"


def compiled(check: "Check") -> list[str]:
    return [COMPILE] if check.scale.compile else []


def said(check: "Check", run: str) -> list[str]:
    return re.findall(r"^train\.cuda_graphs: .*$", check.log(run), re.M)[:3]


def without_graph(check: "Check", run: str, words: list[str]) -> dict[str, str]:
    """A mark in the results: a GPU was told to replay microbatches, and did not."""
    asked = "train.cuda_graphs=true" in words and check.scale.compile
    return {"failed": f"no graph: {said(check, run)}"} if asked and GRAPH not in check.log(run) else {}


def failed(code: int | None) -> dict[str, str]:
    """A mark in the results; a run that had no time (None) has not failed."""
    return {} if code in (0, None) else {"failed": f"exit code {code}"}


def missing(code: int | None, what: str) -> dict[str, str]:
    return {} if code is None else {"failed": f"exit code {code}, and no {what}"}


# --- several at a time ---

# Of runs: the words of their settings, processes, and the GPU's GB that each process takes at most.
Jobs = dict[str, tuple[list[str], int, int]]
ALONE, BESIDE, TINY = 10, 15, 5  # GPT-2; with a graph, and a microbatch without one beside it; a model of some layers


def compare(check: "Check", section: str, jobs: Jobs) -> None:
    """Run these, and tell of each kind, which stands before the comma, whether its runs have one digest."""
    codes = run_all(check, jobs)
    for kind in dict.fromkeys(name.partition(", ")[0] for name in jobs if not name.startswith("undisturbed")):
        names = [name for name in jobs if name.startswith(f"{kind}, ")]
        digests = {name.partition(", ")[2]: digest(check, run_name(name)) for name in names}
        there = [value for value in digests.values() if value]
        wrong = [f"{name}: {codes[name]} {check.tail(run_name(name))}" for name in names if codes[name]]
        ended = [name for name in names if codes[name] == 0]
        wrong += [
            f"{name}: {lacks}" for name in ended if (lacks := without_graph(check, run_name(name), jobs[name][0]))
        ]
        replayed = [name.partition(", ")[2] for name in names if GRAPH in check.log(run_name(name))]
        equal = len(set(there)) == 1 if len(there) > 1 else None
        figures = {"digests": digests, "had a graph": replayed, **({"failed": wrong} if wrong else {})}
        check.found(section, kind, equal=equal, **figures)


def run_name(job: str) -> str:
    return "bits-" + re.sub(r"\W+", "-", job)


def run_all(check: "Check", jobs: Jobs) -> dict[str, int | None]:
    """The exit codes of runs that share the GPU, as many at a time as it and the cores have room for.

    None: there was no time, or more memory is needed than the GPU has.
    """
    room, codes, running = room_in_gb(), dict[str, int | None](), dict[str, subprocess.Popen[bytes]]()
    needs = {name: processes * each for name, (_, processes, each) in jobs.items()}
    waiting = [name for name in jobs if needs[name] <= room or not check.scale.compile]
    while (waiting or running) and check.left() > 0:
        for name in [name for name, process in running.items() if process.poll() is not None]:
            codes[name] = running.pop(name).returncode
            if not name.startswith("undisturbed"):
                check.forget(run_name(name))
        taken = sum(needs[name] for name in running)
        if waiting and (not running or taken + needs[waiting[0]] <= room):
            name = waiting.pop(0)
            words, processes, _ = jobs[name]
            running[name] = check.start(run_name(name), *check.launch(run_name(name), *words, processes=processes))
        time.sleep(0.1)
    for process in running.values():
        check.kill(process)
    return {name: codes.get(name) for name in jobs}


def room_in_gb() -> int:
    """Of the GPU that this process sees, no more than 8 for each core; without one, for two runs."""
    import torch

    free = torch.cuda.mem_get_info()[0] / 1e9 if torch.cuda.is_available() else 2 * ALONE
    return int(min(free, 8 * max(4, os.cpu_count() or 1)))


def digest(check: "Check", name: str) -> str | None:
    """Of the last snapshot, by the run's last line; None if it did not end."""
    found = re.search(r"^finished: step \d+, digest (\w+)", check.log(name), re.M)
    return found and found[1][:16]
