"""What is started in a folder runs no file of it in place of a package, and finds the user's own code there."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kits import bpe_kit
from tests.kits.paths_kit import ran
from tests.kits.run_kit import NewRun

pytestmark = pytest.mark.slow
MINGPT = str(Path(sys.executable).with_name("mingpt"))
PACKAGES = {
    "torch",
    "numpy",
    "pydantic",
    "hydra",
    "omegaconf",
    "fsspec",
    "filelock",
    "safetensors",
    "tokenizers",
    "argcomplete",
}
STANDARD = {name for name in sys.stdlib_module_names if name not in sys.builtin_module_names and find_spec(name)}
OWN = "schedule._target_=mine.flat"
COMMANDS: dict[str, list[str]] = {
    "launch": [MINGPT, "launch", "--nproc-per-node=2", "data.workers=1", OWN],
    "launch, cold": [MINGPT, "launch", "data.workers=1", "train.threads=2", OWN],
    "a node of SkyPilot's": [MINGPT, "launch", "--platform=sky", OWN],
    "train": [MINGPT, "train", "data.workers=1", OWN],
    "multirun": [MINGPT, "train", "-m", "hydra.sweep.dir=sweep", "seed=1", OWN],
    "torchrun's worker": [sys.executable, "-m", "mingpt.train", OWN],
    "completion": [MINGPT, "completion", "bash"],
    "selftest": [MINGPT, "selftest", "--seconds=0", "--device=cpu"],
    "prepare": [MINGPT, "prepare", "text.txt", "--out=out", "--tokenizer=gpt2", "--processes=2"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_file_in_the_current_folder_stands_for_a_package(name: str, tmp_path: Path, new_run: NewRun) -> None:
    (folder := tmp_path / "theirs").mkdir()
    bpe_kit.write_gpt2(folder / "gpt2")
    (folder / "text.txt").write_text("the king " * 100)
    (folder / "mine.py").write_text("def flat(step):\n    return 1.0\n")
    # `python -m` itself, which is Python's, looks for the standard library in this folder, too.
    for module in PACKAGES if "-m" in COMMANDS[name][:2] else PACKAGES | STANDARD:
        (folder / f"{module}.py").write_text("open(__file__ + '.ran', 'w').close()\n")
    command = COMMANDS[name]
    if OWN in command:
        places = () if name == "multirun" else (f"run.dir={tmp_path}/run",)
        tiny = [o for o in new_run().arguments() if not o.startswith(("run.dir=", "schedule."))]
        command = [*command, *tiny, *places, "train.max_steps=2"]
    ended = ran(command, cwd=folder)
    assert [path.name for path in folder.glob("*.ran")] == []
    machine_differs = name == "selftest" and ended.returncode == 1
    assert ended.returncode == 0 or machine_differs, ended.stdout + ended.stderr
