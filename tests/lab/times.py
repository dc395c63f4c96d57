"""`python tests/lab/times.py`: from the command to the first step, for each launcher, in the lab. Prints JSON.

Two nodes of two processes, the small model of the lab's tests. set-up: until preflight starts (installing, data);
launcher: torchrun, or srun; start: a process's imports and data; load: model, snapshots, DDP. The first launch on a
cluster installs, `again` finds it done.
"""

import json
import re
import subprocess
import time
from collections.abc import Iterator

from lab_kit import HOME, ROOT, SCRIPTS, SMALL, USER, USER_ID, on, shared, sky

# The last thing before processes are started, whatever starts them; then a line of the process that speaks.
BEGINS = re.compile(r"preflight in ([\d.]+) s: nodes 2")
STARTED = re.compile(
    r"start: import ([\d.]+) s, data ([\d.]+) s, rendezvous ([\d.]+) s, load ([\d.]+) s, first step ([\d.]+)"
)


def watch(lines: Iterator[str], began: float) -> dict[str, float]:
    """The parts of the time until the first step, in seconds, from the lines as they come."""
    ready, preflight = began, 0.0
    for line in lines:
        if match := BEGINS.search(line):
            ready, preflight = time.monotonic(), float(match[1])
        if match := STARTED.search(line):
            done = time.monotonic()
            imports, data, rendezvous, load, first = map(float, match.groups())
            parts = {"start": imports + data, "rendezvous": rendezvous, "load": load, "first step": first}
            before = {"set-up": ready - began - preflight, "preflight": preflight}
            whole = {**before, "launcher": done - ready - sum(parts.values()), **parts, "all": done - began}
            return {name: round(seconds, 1) for name, seconds in whole.items()}
    raise SystemExit("the run ended before its first step")


def by_sky(name: str, *words: str) -> dict[str, float]:
    overrides = " ".join((*SMALL, "train.max_steps=8"))
    run = ("--env", f"RUN_DIR={shared(name)}", "--env", f"OVERRIDES={overrides}")
    began = time.monotonic()
    command = [str(SCRIPTS / "client.sh"), "sky", *words, *run]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        assert process.stdout
        found = watch(process.stdout, began)
        for _ in process.stdout:
            pass
    return found


def by_slurm(script: str, *flags: str) -> dict[str, float]:
    """In the checkout of SkyPilot's last launch, whose set-up is done."""
    project = next(HOME.glob(".sky_clusters/*/sky_workdir"))
    log = shared(script) / "log"
    command = ["sbatch", "--parsable", "--nodes=2", *flags, f"--output={log}", f"--error={log}", "--open-mode=append"]
    command += [f"recipes/slurm/{script}.sbatch", *SMALL, "train.max_steps=8", f"run.dir={log.parent}/run"]
    began = time.monotonic()
    on("login", "runuser", "-u", USER, "--", "bash", "-c", f"cd {project} && " + " ".join(command))
    subprocess.run(["touch", log], check=True)
    subprocess.run(["chown", str(USER_ID), str(log)], check=True)
    with subprocess.Popen(["tail", "-f", "-n", "+1", log], stdout=subprocess.PIPE, text=True) as tail:
        assert tail.stdout
        try:
            return watch(tail.stdout, began)
        finally:
            tail.kill()


def main() -> None:
    sky("down", "-y", "times", check=False)
    times = {
        "sky launch train.yaml": by_sky("first", "launch", "-y", "-c", "times", "recipes/train.yaml"),
        "sky launch train.yaml, again": by_sky("again", "launch", "-y", "-c", "times", "recipes/train.yaml"),
        "sky exec train-rdzv.yaml": by_sky("rdzv", "exec", "times", "recipes/train-rdzv.yaml"),
        "sbatch train.sbatch": by_slurm("train", "--gpus-per-node=2"),
        "sbatch gloo.sbatch": by_slurm("gloo", "--ntasks-per-node=2"),
    }
    sky("down", "-y", "times")
    print(json.dumps(times, indent=1))


if __name__ == "__main__":
    main()
