"""recipes/setup.sh with stubs in place of uv and Python: what it installs when, and that two at once don't collide."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pydantic
import pytest

from mingpt.cli.command import code_of
from mingpt.prepare import extras
from tests.kits.paths_kit import ROOT, ran
from tests.kits.recipe_kit import envs, recipe

TOOLS = ("bash", "sh", "cat", "chmod", "dirname", "flock", "grep", "mkdir", "paste", "rm", "sha256sum", "sleep", "sort")

# `python` stands for the environment's: it knows how to be pip (which takes a while, or fails), the fetch,
# mingpt.prepare.extras (which finds in the overrides what the real one finds in the config), and torch on a node
# without a usable GPU. REAL is a Python for the real one.
PYTHON = """#!/bin/sh
case "$*" in *base_prefix*) [ ! -e .venv/half ]; exit $? ;; esac
echo "python $*" >>log
case "$*" in *\\ /dev/stdin) cat >/dev/null ;; esac
case "$*" in *constraints-cpu.txt) exit 1 ;; *-m\\ pip*) sleep 0.02; [ ! -e broken ]; exit $? ;; esac
case "$*" in *import\\ torch*) exit 1 ;; esac
case "$*" in *mingpt.prepare.extras*) [ -z "$REAL" ] || exec "$REAL" "$@" ;; esac
case "$*" in *mingpt.prepare.extras*) set -- "$@" "$EXPERIMENT $RUN_DIR $OVERRIDES" ;; esac
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
        shutil.copy(ROOT / "recipes/install.sh", self.folder / "recipes")
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
        quiet = "-m pip install --quiet --disable-pip-version-check --no-build-isolation"
        return (self.folder / "log").read_text().replace(quiet, "pip").splitlines()


MAKE = [
    "uv venv --quiet --python >=3.11,<3.14 .venv",
    "uv pip install --quiet --python .venv --constraint constraints.txt pip",
]
LOOK = ["python -m mingpt.prepare.extras --from-env", "python -m mingpt fetch --for --from-env"]


BUILD = ["python pip --no-deps --require-hashes -r /dev/stdin", "python pip -c constraints.txt hatchling setuptools"]
EARLY = [*BUILD, "python pip -c constraints.txt hydra-core pydantic fsspec", LOOK[0]]


def install(extras: str = "") -> list[str]:
    return [
        *BUILD,
        "python pip --no-deps --require-hashes -r constraints-cpu.txt",
        "python pip --no-deps -e .",
        f"python pip -c constraints.txt mingpt-exact[{extras}]",
    ]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.has("uv")
    return made


def test_what_a_set_up_installs_and_fetches(machine: Machine) -> None:
    """The second time nothing; what another run or a changed lock needs, beside what earlier runs needed."""
    lock = machine.folder / "constraints.txt"
    (machine.folder / "x=y").touch()  # a name that x=* matches
    more = {"EXPERIMENT": "gpt2", "RUN_DIR": "s3://b/run 1", "OVERRIDES": "x=* seed=1"}
    mistake = {"OVERRIDES": "mistake=1"}
    assert machine.set_up() == [*MAKE, *EARLY, *install(), *LOOK]
    assert machine.set_up() == LOOK
    lock.write_text(lock.read_text() + "# newer\n")
    assert machine.set_up() == [*EARLY, *install(), *LOOK]
    needs, fetches = (f"{line} experiment=gpt2 a= b" for line in LOOK)
    assert machine.set_up(arguments=("experiment=gpt2", "a= b")) == [needs, *install("bpe"), fetches]
    assert machine.set_up(more) == [LOOK[0], *install("bpe,s3"), LOOK[1]]
    assert machine.set_up(more) == machine.set_up() == LOOK  # and a run that needs less
    (machine.folder / "broken").touch()
    lock.write_text(lock.read_text() + "# newer still\n")
    assert machine.set_up(code=1) == BUILD[:1]
    (machine.folder / "broken").unlink()
    assert machine.set_up() == [*EARLY, *install("bpe,s3"), *LOOK]
    (machine.folder / ".venv/half").touch()  # removed
    assert machine.set_up() == [*MAKE, *EARLY, *install("bpe,s3"), *LOOK]
    assert (machine.set_up(mistake, code=64), machine.errors) == (LOOK[:1], "error: mistake\n")
    shutil.rmtree(machine.folder / ".venv")
    assert (machine.set_up(mistake, code=64), machine.errors) == ([*MAKE, *EARLY], "error: mistake\n")  # before torch
    assert machine.set_up() == [*EARLY, *install(), *LOOK]


def test_of_two_nodes_that_share_a_folder_one_installs_and_the_other_waits(machine: Machine) -> None:
    processes = [machine.start() for _ in range(3)]
    assert [process.wait(200) for process in processes] == [0, 0, 0]
    assert machine.calls() == [*MAKE, *EARLY, *install(), *LOOK, *LOOK, *LOOK]


def test_without_uv_python_makes_the_environment_and_uv_is_found_where_skypilot_puts_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.has("python3")
    assert machine.set_up() == ["python3 -m venv .venv", *EARLY, *install(), *LOOK]
    assert machine.set_up() == LOOK
    shutil.rmtree(machine.folder / ".venv")
    on_the_path, machine.bin = machine.bin, machine.folder / ".local/bin"  # HOME is the folder
    machine.bin.mkdir(parents=True)
    machine.has("uv")
    machine.bin = on_the_path
    assert machine.set_up() == [*MAKE, *EARLY, *install(), *LOOK]


def test_gpus_that_torch_cannot_use_fail_the_set_up_and_not_the_speed(machine: Machine) -> None:
    machine.has("nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA L4'\n")
    assert machine.set_up(code=1)[-1].startswith("python -c import torch")
    assert not (machine.folder / ".venv/.setup").exists()


MISTAKES = [
    "train.max_step=3", "run.name='a b'", "model=gpt3", "optimizer.lr=-1", "data.workers=-1", "model.n_head=5",
    "+new=1", "batch.micro_size=7", "track=[wandbb]", "experiment=shakespear", "run.dir=r2://b/run",
    "train.steps=1; seed=x",
]  # fmt: skip
# Judges lists of overrides, in a Python that has no packages but hydra, pydantic, fsspec and what they need.
WITHOUT_TORCH = """
import json, sys
sys.path[:0] = sys.argv[1:]
from mingpt.cli.command import code_of
from mingpt.prepare import extras
found = [code_of(lambda: extras.main(words)) for words in json.load(sys.stdin)]
print(json.dumps(found))
"""
LIGHT = (
    "hydra", "omegaconf", "antlr4", "packaging", "yaml", "_yaml", "fsspec", "pydantic", "pydantic_core",
    "annotated_types", "typing_extensions.py", "typing_inspection",
)  # fmt: skip


@pytest.mark.slow
def test_a_config_is_judged_without_torch_as_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = Path(pydantic.__file__).parent.parent
    for name in LIGHT:  # as `recipes/install.sh PYTHON config` leaves it
        (tmp_path / name).symlink_to(packages / name)
    (tmp_path / "mine.py").write_text(
        "import torch\n\nSCALE = torch.arange(3) * 2\n\nclass Net(torch.nn.Module): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    right = [[f"experiment={file.stem}"] for file in sorted((ROOT / "configs/experiment").glob("*.yaml"))]
    own = [[*words, "train.max_step=3"] for words in right]
    cases = [*right, *own, *(["experiment=synthetic", *mistake.split("; ")] for mistake in MISTAKES)]
    cases += [["experiment=synthetic", "model=own", "model._target_=mine.Net"]]
    python = [sys.executable, "-I", "-S", "-c", WITHOUT_TORCH, str(tmp_path), str(ROOT)]
    early = ran(python, input=json.dumps(cases), cwd=ROOT)
    assert early.returncode == 0, early.stderr
    codes = [code_of(partial(extras.main, words)) for words in cases]
    found = json.loads(early.stdout.splitlines()[-1])
    # Code of the user's own imports torch, so it is not judged without: neither its name nor its arguments.
    of_own = {"experiment=cifar10", "experiment=mnist", "experiment=classifier", "model._target_=mine.Net"}
    for words, code, whole in zip(cases, found, codes, strict=True):
        assert code == whole or (code == 0 and words[-1] in of_own), words
    assert codes[len(right) : -1] == [64] * (len(own) + len(MISTAKES))
    told = set(capsys.readouterr().err.splitlines())
    assert {line for line in early.stderr.splitlines() if line.startswith("error")} <= told


TRACKERS = ("mlflow", "tensorboard", "trackio", "wandb")
PACKAGES = (*TRACKERS, "s3fs", "gcsfs", "adlfs", "tokenizers", "pyarrow", "huggingface_hub", "lm_eval")


@pytest.mark.slow
def test_a_recipes_set_up_installs_what_its_run_needs(machine: Machine) -> None:
    """Nothing but the package's own requirements is there when it looks for what to install."""
    (machine.folder / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({PACKAGES}))")
    env = {
        **envs("serve", RUN_DIR="s3://b/run", OVERRIDES="track=[wandb,mlflow]"), "MLFLOW_TRACKING_URI": "http://mlflow:5000",
        "PATH": str(machine.bin), "HOME": str(machine.folder), "REAL": sys.executable,
        "PYTHONPATH": f"{machine.folder}:{ROOT}",
    }  # fmt: skip
    script = str(recipe("serve")["setup"])
    subprocess.run([machine.bin / "bash", "-c", script], env=env, cwd=machine.folder, check=True, timeout=600)
    assert install("mlflow,s3,wandb")[-1] in machine.calls()


@pytest.mark.slow
def test_a_run_on_one_machines_disk_is_told_once(machine: Machine) -> None:
    env = {
        "REAL": sys.executable, "PYTHONPATH": str(ROOT), "EXPERIMENT": "synthetic", "RUN_DIR": "runs",
        "SKYPILOT_SETUP_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }  # fmt: skip
    for _ in ("a new machine", "again"):
        machine.set_up(env)
        assert machine.errors.count("WARNING: run.dir=runs") == 1, machine.errors
