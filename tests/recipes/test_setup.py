"""recipes/setup.sh with stubs in place of uv and Python: what it installs when, and that two at once don't collide."""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from paths_kit import ROOT
from recipe_kit import BUCKET, envs, recipe

TOOLS = ("bash", "sh", "cat", "chmod", "dirname", "flock", "grep", "mkdir", "paste", "rm", "sha256sum", "sleep", "sort")

# `python` stands for the environment's: it knows how to be recipes/locked.py (which takes a while, or fails), the
# fetch, mingpt.prepare.extras (which finds in the overrides what the real one finds in the config), and torch on a
# node without a usable GPU. REAL is a Python for the real one.
PYTHON = """#!/bin/sh
case "$*" in *base_prefix*) [ ! -e .venv/half ]; exit $? ;; esac
echo "python $*" >>log
case "$*" in *locked.py*) sleep 0.3; [ ! -e broken ]; exit $? ;; esac
case "$*" in *import\\ torch*) exit 1 ;; esac
case "$*" in *mingpt.prepare.extras*) [ -z "$REAL" ] || exec "$REAL" "$@" ;; esac
case "$*" in *mingpt.prepare.extras*mistake*) echo "error: mistake" >&2; exit 64 ;; esac
case "$*" in *mingpt.prepare.extras*gpt2*) echo bpe ;; esac
case "$*" in *mingpt.prepare.extras*s3:*) echo s3 ;; esac
"""

# `uv venv` and `python3 -m venv` make an environment with that python.
TOOL = """#!/bin/sh
echo "NAME $*" >>log
case "$*" in
  *venv*--python*|*-m\\ venv*) mkdir -p .venv/bin; cat python-stub >.venv/bin/python; chmod +x .venv/bin/python; : >.venv/bin/pip; chmod +x .venv/bin/pip ;;
esac
"""  # noqa: E501


class Machine:
    """A folder with the set-up script, and a PATH that has nothing on it but what the script may need."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder / "repository", folder / "bin"
        (self.folder / "recipes").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(ROOT / "recipes/setup.sh", self.folder / "recipes")
        shutil.copy(ROOT / "recipes/locked.py", self.folder / "recipes")
        for name in ("pyproject.toml", "constraints.txt", "constraints-cpu.txt"):
            shutil.copy(ROOT / name, self.folder)
        (self.folder / "python-stub").write_text(PYTHON)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, tool
            (self.bin / tool).symlink_to(found)

    def has(self, name: str, script: str = TOOL) -> None:
        (self.bin / name).write_text(script.replace("NAME", name))
        (self.bin / name).chmod(0o755)

    def start(self, *arguments: str, **env: str) -> "subprocess.Popen[str]":
        environment = {"PATH": str(self.bin), "HOME": str(self.folder), **env}
        script = self.folder / "recipes/setup.sh"
        return subprocess.Popen(
            ["bash", script, *arguments], env=environment, cwd="/", stderr=subprocess.PIPE, text=True
        )

    def set_up(self, env: Mapping[str, str] | None = None, code: int = 0, arguments: Sequence[str] = ()) -> list[str]:
        """What it calls, in order."""
        (self.folder / "log").unlink(missing_ok=True)
        process = self.start(*arguments, **(env or {}))
        _, self.errors = process.communicate(timeout=600)
        assert process.returncode == code, self.errors
        return self.calls()

    def calls(self) -> list[str]:
        return re.sub(r"--uv /\S+", "--uv UV", (self.folder / "log").read_text()).splitlines()


MAKE = "uv venv --quiet --python >=3.11,<3.14 .venv"
INSTALL = "python recipes/locked.py --uv UV constraints.txt -e ."
LOOK = ["python -m mingpt.prepare.extras", "python -m mingpt.data.fetch --for"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.has("uv")
    return made


def test_the_second_time_there_is_nothing_to_install(machine: Machine) -> None:
    assert machine.set_up() == [MAKE, INSTALL, *LOOK]
    assert machine.set_up() == LOOK


def test_a_changed_lock_is_installed_into_the_environment_that_is_there(machine: Machine) -> None:
    machine.set_up()
    with (machine.folder / "constraints.txt").open("a") as file:
        file.write("# newer\n")
    assert machine.set_up() == [INSTALL, *LOOK]


def test_a_set_up_that_failed_is_done_again(machine: Machine) -> None:
    (machine.folder / "broken").touch()
    assert machine.set_up(code=1) == [MAKE, INSTALL]
    (machine.folder / "broken").unlink()
    assert machine.set_up() == [INSTALL, *LOOK]


def test_an_environment_that_was_half_removed_is_made_anew(machine: Machine) -> None:
    machine.set_up({"RUN_DIR": "s3://b/run"})
    (machine.folder / ".venv/half").touch()
    assert machine.set_up() == [MAKE, f"{INSTALL}[s3]", *LOOK]
    assert machine.set_up() == LOOK


def test_of_two_nodes_that_share_a_folder_one_installs_and_the_other_waits(machine: Machine) -> None:
    processes = [machine.start() for _ in range(3)]
    assert [process.wait(200) for process in processes] == [0, 0, 0]
    assert machine.calls() == [MAKE, INSTALL, *LOOK, *LOOK, *LOOK]


def looks(overrides: str) -> list[str]:
    return [f"{line} {overrides}" for line in LOOK]


def test_what_the_run_needs_is_installed_and_fetched(machine: Machine) -> None:
    env = {"EXPERIMENT": "gpt2", "RUN_DIR": "s3://b/run 1", "OVERRIDES": "x=* seed=1"}
    (machine.folder / "x=y").touch()  # a name that x=* matches
    extras, fetch = looks("experiment=gpt2 run.dir=s3://b/run 1 x=* seed=1")
    assert machine.set_up(env) == [MAKE, INSTALL, extras, f"{INSTALL}[bpe,s3]", fetch]
    assert machine.set_up(env) == [extras, fetch]


def test_what_an_earlier_run_needed_stays_when_another_needs_less_or_the_lock_changes(machine: Machine) -> None:
    machine.set_up({"RUN_DIR": "s3://b/run"})
    assert machine.set_up() == LOOK
    extras, fetch = looks("experiment=gpt2")
    assert machine.set_up({"EXPERIMENT": "gpt2"}) == [extras, f"{INSTALL}[bpe,s3]", fetch]
    with (machine.folder / "constraints.txt").open("a") as file:
        file.write("# newer\n")
    assert machine.set_up() == [f"{INSTALL}[bpe,s3]", *LOOK]


def test_overrides_may_be_arguments(machine: Machine) -> None:
    machine.set_up()
    assert machine.set_up(arguments=("experiment=gpt2", "a= b")) == [
        looks("experiment=gpt2 a= b")[0], f"{INSTALL}[bpe]", looks("experiment=gpt2 a= b")[1]
    ]  # fmt: skip


def test_a_mistake_in_the_overrides_ends_the_set_up(machine: Machine) -> None:
    assert machine.set_up({"OVERRIDES": "mistake=1"}, code=64)[-1] == looks("mistake=1")[0]
    assert machine.errors == "error: mistake\n"


def test_without_uv_python_makes_the_environment(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.has("python3")
    install = "python recipes/locked.py constraints.txt -e ."
    assert machine.set_up() == ["python3 -m venv .venv", install, *LOOK]
    assert machine.set_up() == LOOK


def test_uv_is_found_where_skypilot_puts_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.bin = machine.folder / ".local/bin"  # HOME is the folder
    machine.bin.mkdir(parents=True)
    machine.has("uv")
    machine.bin = tmp_path / "bin"
    assert machine.set_up() == [MAKE, INSTALL, *LOOK]


def test_gpus_that_torch_cannot_use_fail_the_set_up_and_not_the_speed(machine: Machine) -> None:
    machine.has("nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA L4'\n")
    assert machine.set_up(code=1)[-1].startswith("python -c import torch")
    assert "torch can't use this node's GPUs" in machine.errors
    assert not (machine.folder / ".venv/.setup").exists()


TRACKERS = ("mlflow", "tensorboard", "trackio", "wandb")
PACKAGES = (*TRACKERS, "s3fs", "gcsfs", "adlfs", "tokenizers", "pyarrow", "huggingface_hub", "lm_eval")


@pytest.mark.parametrize("name", ["train", "train-rdzv", "train-spot", "train-bucket", "evaluate", "generate", "serve"])
def test_the_set_up_of_each_recipe_installs_the_trackers_of_its_run(name: str, tmp_path: Path) -> None:
    """Nothing but the package's own requirements is there when it looks for what to install."""
    machine = Machine(tmp_path)
    machine.has("uv")
    (machine.folder / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({PACKAGES}))")
    given = BUCKET.get(name, {"RUN_DIR": "s3://b/run"})
    for track, wanted in ("", "s3,tensorboard"), ("track=[wandb,mlflow]", "mlflow,s3,tensorboard,wandb"):
        env = {
            **envs(name, **given, OVERRIDES=track), "MLFLOW_TRACKING_URI": "http://mlflow:5000",
            "PATH": str(machine.bin), "HOME": str(machine.folder), "REAL": sys.executable,
            "PYTHONPATH": f"{machine.folder}:{ROOT}",
        }  # fmt: skip
        script = str(recipe(name)["setup"])
        subprocess.run([machine.bin / "bash", "-c", script], env=env, cwd=machine.folder, check=True, timeout=600)
        assert f"{INSTALL}[{wanted}]" in machine.calls()
