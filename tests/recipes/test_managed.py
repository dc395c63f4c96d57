"""Managed jobs: how a node ends, from which SkyPilot decides whether the job starts again (lab/test_sky.py)."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mingpt.launch.managed import run
from tests.kits.node_kit import needs_mount
from tests.kits.paths_kit import ROOT, ran
from tests.kits.recipe_kit import REQUIRED, envs, recipe, sky_variables

# In the place of the preflight and the launcher: shell lines, which the environment has. Who waits says for how long.
SITE = """
import os, sys, time
if os.environ.get("WAITS") and sys.orig_argv[2:3] == ["mingpt.launch"] and sys.orig_argv[1].endswith("/world/start"):
    import signal
    signal.signal(signal.SIGTERM, lambda *_: (print("snapshot", flush=True), os._exit(75)))
    print("waits", flush=True)
    time.sleep(600)
line = {"mingpt.launch.starts": "COUNT", "mingpt.preflight": "LOOK", "mingpt.launch": "LAUNCH"}.get(sys.orig_argv[2])
if line and sys.orig_argv[1].endswith("/world/start"):  # as children of mingpt start
    os.execvp("bash", ["bash", "-c", os.environ.get(line, "exit 0")])
time.sleep = print
"""
# Of a node, the processes between Slurm's daemon and the run section: slurmstepd, the task's shell.
STEPD = """
import ctypes, subprocess
ctypes.CDLL(None).prctl(15, b"slurmstepd", 0, 0, 0)  # PR_SET_NAME
print(subprocess.call(["bash", "-c", "bash run.sh >said; exit $?"]))
"""


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
    """By the look at its starts before, its preflight, and its launcher."""
    monkeypatch.setenv("SKYPILOT_NODE_RANK", "0")
    (program := tmp_path / "python").write_text(f"#!/bin/sh\necho $* >>{tmp_path}/log\n[ $2 != $ENDS ] || {end}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    for begun, ends in enumerate(("mingpt.launch.starts", "mingpt.preflight", "mingpt.launch"), 1):
        (tmp_path / "log").unlink(missing_ok=True)
        monkeypatch.setenv("ENDS", ends)
        assert run(["--from-env"]) == code
        assert (tmp_path / "log").read_text().count(" --from-env\n") == (begun if code else 3)
    monkeypatch.setenv("SKYPILOT_NODE_RANK", "1")  # the first node counts for all
    (tmp_path / "log").unlink()
    run(["--from-env"])
    assert "starts" not in (tmp_path / "log").read_text()


def test_a_node_that_is_asked_to_stop_waits_for_its_launcher(tmp_path: Path) -> None:
    env = section(tmp_path, LAUNCH="trap 'echo snapshot; exit 75' TERM; echo $$; while :; do sleep 0.01; done")
    process = subprocess.Popen(["bash", "run.sh"], env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    launcher = int(process.stdout.readline())
    for pid in (process.pid, launcher):  # as SkyPilot does it: to each
        os.kill(pid, signal.SIGTERM)
    assert process.communicate(timeout=600)[0] == "snapshot\n"
    assert process.returncode == 75


@pytest.mark.slow
def test_a_user_error_has_the_word_whichever_node_ends_first(tmp_path: Path) -> None:
    """On Slurm a signal ranks above all codes; elsewhere SkyPilot sees both, if a crash waits for the other node."""
    codes = list[str]()
    for end in ("exit 64", "exit 70"):
        env = section(tmp_path, LAUNCH=end)
        codes.append(ran([sys.executable, "-c", STEPD], env=env, cwd=tmp_path).stdout)
    assert codes == [f"{-signal.SIGRTMAX}\n", "70\n"]
    assert (tmp_path / "said").read_text() == "30.0\n"
    resources = recipe("train-spot")["resources"]
    assert isinstance(resources, dict)
    assert resources["job_recovery"]["recover_on_exit_codes"] == [70, 75, 143]  # 128 + SIGRTMAX is 192


@pytest.mark.slow
@needs_mount
def test_the_hook_of_the_page_stops_a_pod(tmp_path: Path) -> None:
    """In a pid namespace: it ends by name. The launcher's own command line has other words than the run section's."""
    page = (ROOT / "docs/skypilot.md").read_text()
    (hooks,) = [
        found
        for text in re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
        if "hooks" in (found := yaml.safe_load(text)).get("config", {})
    ]
    (hook,) = hooks["config"]["hooks"]
    (tmp_path / "hook.sh").write_text(hook["run"])
    env = section(tmp_path, WAITS="1")
    script = (
        "bash run.sh >said & until grep -q waits said; do sleep 0.1; done; "
        'timeout 20 bash -c "$(cat hook.sh)"; echo $?; wait $!; echo $?'
    )
    done = ran(
        ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child", "timeout", "100", "bash", "-c", script],
        env=env,
        cwd=tmp_path,
    )
    assert done.stdout.split() == ["0", "75"], done.stdout + done.stderr
    assert (tmp_path / "said").read_text() == "waits\nsnapshot\n"
