"""Managed jobs: which codes SkyPilot is given when one node ends before another, and whether it goes on then."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path

import psutil
import pytest

from mingpt.launch.managed import run
from node_kit import wait_until
from paths_kit import ROOT
from recipe_kit import REQUIRED, envs, recipe, sky_variables

# In the place of the preflight and the launcher: shell lines, which the environment has.
SITE = """
import os, sys
if (line := {"mingpt.preflight": "LOOK", "mingpt.launch": "LAUNCH"}.get(sys.orig_argv[2])) and sys.orig_argv[1] == "-m":
    os.execvp("bash", ["bash", "-c", os.environ.get(line, "exit 0")])
"""
# Of a node, the processes between Slurm's daemon and the run section, as SkyPilot 0.14.1 starts them: slurmstepd, the
# task's shell, SkyPilot's Python, the section's shell.
STEPD = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(15, b"slurmstepd", 0, 0, 0)  # PR_SET_NAME
task = ["bash", "-c", '"$@"; exit $?', "bash", *sys.argv[1:]]
print(subprocess.Popen(task, stdout=subprocess.DEVNULL).wait())
"""
EXECUTOR = "import subprocess, sys; sys.exit(subprocess.Popen(['bash', 'run.sh'], start_new_session=True).wait())"
TRAINS = "sleep 60 & trap 'kill $!; exit 75' TERM; wait"
# What the node that ends first does, what the other one does, and whether SkyPilot starts the job again.
ENDS = {
    "a user error": ("exit 64", "exit 64", False),
    "a crash": ("exit 70", "exit 70", True),
    "a crash since the other node has a user error": ("exit 70", "exit 64", False),
    "a stop on request": ("exit 75", "exit 75", True),
    "a killed launcher": ("kill -KILL $$", TRAINS, True),
    "a lost node": (TRAINS, TRAINS, True),
}


def section(folder: Path, **variables: str) -> dict[str, str]:
    """Write the run section of train-spot.yaml, as SkyPilot does. Returns the environment of its first node."""
    (folder / ".venv/bin").mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITE)
    (folder / "run.sh").write_text(str(recipe("train-spot")["run"]))
    program = folder / ".venv/bin/mingpt"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mingpt "$@"\n')
    program.chmod(0o755)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{folder}:{ROOT}"}
    return {**env, **envs("train-spot", **REQUIRED["train-spot"]), **sky_variables(0), **variables}


@pytest.mark.parametrize(
    ("end", "code"),
    [("exit 0", 0), ("exit 64", 64), ("exit 70", 70), ("exit 75", 75), ("exit 1", 70), ("kill -KILL $$", 70)],
)
def test_a_node_ends_with_a_code_that_skypilot_is_told_of(
    end: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its preflight, and by its launcher."""
    (program := tmp_path / "python").write_text(f"#!/bin/sh\necho $* >>{tmp_path}/log\n[ $2 != $ENDS ] || {end}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    for ends, begun in (("mingpt.preflight", 1), ("mingpt.launch", 2)):
        (tmp_path / "log").unlink(missing_ok=True)
        monkeypatch.setenv("ENDS", ends)
        assert run(["--from-env"]) == code
        assert (tmp_path / "log").read_text().count(" --from-env\n") == (begun if code else 2)


def test_a_node_that_is_asked_to_stop_waits_for_its_launcher(tmp_path: Path) -> None:
    env = section(tmp_path, LAUNCH="trap 'echo snapshot; exit 75' TERM; echo $$; while :; do sleep 0.01; done")
    process = subprocess.Popen(["bash", "run.sh"], env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    launcher = int(process.stdout.readline())
    for pid in (process.pid, launcher):  # as SkyPilot does it: to each
        os.kill(pid, signal.SIGTERM)
    assert process.communicate(timeout=600)[0] == "snapshot\n"
    assert process.returncode == 75


class Job:
    """The run section on two nodes, each of which has a line for its launcher."""

    def __init__(self, folder: Path, on_slurm: bool, lines: tuple[str, str]) -> None:
        self.folder, self.on_slurm, self.codes = folder, on_slurm, dict[int, int]()
        self.nodes = [self._start(rank, line) for rank, line in enumerate(lines)]

    def _start(self, rank: int, line: str) -> "subprocess.Popen[str]":
        launch = f"touch begun-{rank}; while [ ! -e go ]; do sleep 0.02; done; {line}"
        env = section(self.folder, LAUNCH=launch, SKYPILOT_NODE_RANK=str(rank))
        command, out = [sys.executable, "-c", EXECUTOR], subprocess.DEVNULL
        if self.on_slurm:
            command, out = [sys.executable, "-c", STEPD, *command], subprocess.PIPE
        return subprocess.Popen(command, env=env, cwd=self.folder, stdout=out, text=True)

    def begin(self) -> None:
        wait_until(lambda: all((self.folder / f"begun-{rank}").exists() for rank in (0, 1)), "both have begun")
        (self.folder / "go").touch()

    def processes(self, rank: int) -> list[psutil.Process]:
        """Of the task or the node, without Slurm's own."""
        node = psutil.Process(self.nodes[rank].pid)
        return [*([] if self.on_slurm else [node]), *node.children(recursive=True)]

    def wait(self) -> list[int]:
        """Returns the codes that SkyPilot compares with the recipe's list: on Slurm srun's alone."""
        left = [process for rank in (0, 1) for process in self.processes(rank)]
        deadline = time.monotonic() + 120
        while len(self.codes) < 2:
            assert time.monotonic() < deadline, self.codes
            for rank in {0, 1} - self.codes.keys():
                if self.nodes[rank].poll() is None:
                    continue
                out = self.nodes[rank].communicate()[0]
                self.codes[rank] = int(out) if self.on_slurm else self.nodes[rank].returncode
                if self.codes[rank] and len(self.codes) == 1:
                    left += self.processes(1 - rank)
                    send(signal.SIGTERM if self.on_slurm else signal.SIGKILL, self.processes(1 - rank))
            time.sleep(0.01)
        send(signal.SIGKILL, left)
        shown = [128 - code if code < 0 else code for code in self.codes.values()]
        if not self.on_slurm:
            return shown
        # srun 22.05.8, tried in the lab: the highest signal of a task, or, if none ended by a signal, the highest code.
        signals = [-code for code in self.codes.values() if code < 0]
        return [128 + max(signals) if signals else max(shown)]


def send(number: int, processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def recovered(codes: list[int]) -> bool:
    resources = recipe("train-spot")["resources"]
    assert isinstance(resources, dict)
    return bool(set(codes) & set(resources["job_recovery"]["recover_on_exit_codes"]))


def ended(folder: Path, case: tuple[bool, str, int]) -> bool:
    """Whether SkyPilot starts a job again whose second node ends half a second after the first."""
    on_slurm, end, first = case
    line, other, _ = ENDS[end]
    lines = {first: line, 1 - first: f"sleep 0.5; {other}"}
    job = Job(folder, on_slurm, (lines[0], lines[1]))
    job.begin()
    if end == "a lost node":
        send(signal.SIGKILL, job.processes(first))
    return recovered(job.wait())


@pytest.mark.slow
def test_a_user_error_ends_a_managed_job_and_all_else_starts_it_again_whichever_node_ends_first(tmp_path: Path) -> None:
    cases = [*product([True], ENDS, (0, 1))]
    cases += product([False], sorted(ENDS.keys() - {"a lost node"}), (0, 1))  # SkyPilot looks at machines there
    with ThreadPoolExecutor(8) as pool:
        folders = [tmp_path / str(number) for number in range(len(cases))]
        again = pool.map(ended, folders, cases)
        assert dict(zip(cases, again, strict=True)) == {case: ENDS[case[1]][2] for case in cases}
