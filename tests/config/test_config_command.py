"""`mingpt train` as its users and launchers see it: exit codes, stdout, stderr, and no folder left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mingpt.config import compose
from mingpt.config.help import help_text
from mingpt.config.validation import validate
from mingpt.errors import UserError
from run_kit import train
from told import Told


def test_mistakes_exit_64_with_all_problems_on_stderr_and_nothing_else(tmp_path: Path, told: Told) -> None:
    wrong = ("model.n_head=5", "batch.micro_siz=8", "reduce=exat", "(", "model=gpt3")
    done = train(tmp_path, *wrong, RANK="0", WORLD_SIZE="8")
    assert (done.returncode, done.stdout, os.listdir(tmp_path)) == (64, "", [])
    told(done.stderr)


def test_cfg_job_prints_the_config_and_leaves_nothing_behind(tmp_path: Path) -> None:
    arguments = ["experiment=gpt2_124m", "data.path=s3://b/x", "optimizer.eps=1e-9", "run.name=one"]
    done = train(tmp_path, "--cfg", "job", *arguments)
    assert (done.returncode, done.stderr, os.listdir(tmp_path)) == (0, "", [])
    assert "  dir: ${run.dir}/snapshots\n" in done.stdout
    assert validate(OmegaConf.to_container(OmegaConf.create(done.stdout), resolve=True)) == compose.configure(arguments)  # type: ignore[arg-type]


def test_help_names_every_group_option_and_key_with_its_default(told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    assert compose.configure(["--help"]) is None
    assert capsys.readouterr().out == help_text() + "\n"
    told(help_text().partition("\n")[2])  # without the program's name


@pytest.mark.parametrize("arguments", ["--nope", "--cfg nope", "--experimental-rerun=x"])
def test_an_unknown_flag_exits_64(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        compose.configure(arguments.split())
    assert exit_.value.code == 64
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert arguments.partition("=")[0].split()[0] in err


@pytest.mark.parametrize(("mistake", "key"), [("foo=1", "foo"), ("run.dir=${nope}", "run.dir")])
def test_cfg_job_of_a_bad_command_line_tells_the_problem_and_prints_nothing(
    mistake: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=f"^{key}"):
        compose.configure(["--cfg", "job", "--resolve", mistake])
    assert capsys.readouterr().out == ""


def test_a_terminal_that_lacks_a_character_is_told_all_the_rest() -> None:
    """What follows from here on, too: a training's log must not end at the first `…`."""
    script = "from mingpt.console import say; say('one …'); say('two')"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=600)
    assert done.stdout == b"one \\u2026\ntwo\n"
