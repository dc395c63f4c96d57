"""`mingpt train` as its users and launchers see it: exit codes, stdout, stderr, and no folder left behind."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from mingpt.config import compose
from mingpt.config.keys import KINDS, keys
from mingpt.config.validation import validate
from mingpt.errors import UserError
from paths_kit import ROOT
from run_kit import train


def test_mistakes_exit_64_with_all_problems_on_stderr_and_nothing_else(tmp_path: Path) -> None:
    wrong = ("model.n_head=5", "batch.micro_siz=8", "reduce=exat", "(", "model=gpt3")
    done = train(tmp_path, *wrong, RANK="0", WORLD_SIZE="8")
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr == (
        "error: 6 problems:\n"
        "  1. '(' is not an override: write key=value, group=option, +key=value or ~key\n"
        "  2. model=gpt3: there is no model 'gpt3' (did you mean gpt?); "
        "there are gopher-44m, gpt-micro, gpt-mini, gpt-nano, gpt, gpt2-large, gpt2-medium, gpt2-xl, gpt2, "
        "modern-0.6b, modern-135m, modern-1b, modern-360m, modern-nano, modern, own\n"
        "  3. batch.micro_siz is not a key (did you mean batch.micro_size?)\n"
        "  4. reduce=exat is not one of exact, fast (did you mean exact?)\n"
        "  5. model.n_head=5 does not divide model.n_embd=128: choose a divisor\n"
        "  6. 8 processes, but only 4 microbatches (batch.global_size=64 / batch.micro_size=16): start at most 4 "
        "processes, lower batch.micro_size or raise batch.global_size\n"
    )
    assert os.listdir(tmp_path) == []


def test_one_mistake_is_one_line(tmp_path: Path) -> None:
    done = train(tmp_path, "model=null")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (64, "", 1)
    assert done.stderr.startswith("error: model=null")
    assert os.listdir(tmp_path) == []


def test_a_missing_text_is_a_mistake_too(tmp_path: Path) -> None:
    done = train(tmp_path, f"data.path={tmp_path}/no.txt", f"data.cache_dir={tmp_path}/cache")
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr == f"error: data.path={tmp_path}/no.txt: there is no such file or bucket: check the spelling\n"


def test_cfg_job_prints_the_config_and_leaves_nothing_behind(tmp_path: Path) -> None:
    arguments = ["experiment=gpt2_124m", "data.path=s3://b/x", "optimizer.eps=1e-9", "run.name=one"]
    done = train(tmp_path, "--cfg", "job", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    printed = OmegaConf.create(done.stdout)
    assert isinstance(printed, DictConfig)
    assert OmegaConf.to_container(printed)["snapshot"]["dir"] == "${run.dir}/snapshots"  # type: ignore[call-overload, index]
    assert validate(OmegaConf.to_container(printed, resolve=True)) == compose.configure(arguments)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


def test_help_names_every_group_option_and_key(tmp_path: Path) -> None:
    done = train(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    for group, options in compose.groups().items():
        assert [f"{group}/"] in lines
        for option, comment in options.items():
            assert [option, *comment.split()] in lines
    for section, kinds in KINDS.items():
        of_kinds = [keys({section: {"kind": kind}}).items() for kind in kinds]
        for key, text in set().union(*of_kinds):
            if key.split(".")[0] in KINDS.keys() - {section}:
                continue
            found = [line for line in lines if line[:1] == [key] and line[1 : 1 + len(text.split())] == text.split()]
            having = sum((key, text) in of for of in of_kinds)  # what all kinds have is there once, else once for each
            assert len(found) == (1 if having == len(of_kinds) else having), key
    assert {line[0] for line in lines if line and line[0] in keys()} == keys().keys()
    values = ["[fp32", "|", "tf32", "|", "bf16", "|", "fp16]", "(fp32)"]
    assert ["precision", *keys()["precision"].split(), *values] in lines
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nope"], "unrecognized arguments: --nope"),
        (["seed=1", "--multirun"], "unrecognized arguments: --multirun"),
        (["--cfg"], "argument --cfg: expected one argument"),
        (["--cfg", "all"], "argument --cfg: invalid choice: 'all'"),
        (["--res"], "unrecognized arguments: --res"),  # no abbreviations: they would change with each new flag
    ],
)
def test_an_unknown_flag_exits_64(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        compose.configure(arguments)
    assert exit_.value.code == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message}")  # argparse's own words go on differently in each Python version
    assert err.endswith("; see --help\n")


def test_flags_and_overrides_mix_in_any_order(capsys: pytest.CaptureFixture[str]) -> None:
    printed = set()
    for arguments in (["--cfg", "job", "seed=3"], ["seed=3", "--cfg", "job"], ["seed=3", "--cfg=job"]):
        assert compose.configure(arguments) is None
        printed.add(capsys.readouterr().out)
    assert len(printed) == 1
    assert "seed: 3\n" in printed.pop()


def test_cfg_job_of_a_bad_command_line_tells_the_problem_and_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"^foo is not a key$"):
        compose.configure(["--cfg", "job", "foo=1"])
    assert capsys.readouterr().out == ""


def test_resolve_fills_in_the_interpolations(capsys: pytest.CaptureFixture[str]) -> None:
    assert compose.configure(["--cfg", "job", "--resolve", "run.dir=/r"]) is None
    assert "  dir: /r/snapshots\n" in capsys.readouterr().out


def test_what_cannot_be_resolved_is_a_mistake_for_cfg_job_too() -> None:
    with pytest.raises(UserError, match=r"^run\.dir: Interpolation key 'nope' not found$"):
        compose.configure(["--cfg", "job", "--resolve", "run.dir=${nope}"])


def test_a_terminal_that_lacks_a_character_is_told_all_the_rest() -> None:
    """What follows from here on, too: a training's log must not end at the first `…`."""
    script = "from mingpt.console import say; say('one …'); say('two')"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=600)
    assert done.stdout == b"one \\u2026\ntwo\n"


def test_cfg_job_prints_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    assert compose.configure(["--cfg", "job", "data.path='http://me:hunter2@host/a.txt?X-Signature=abc'"]) is None
    assert "path: http://***@host/a.txt?***\n" in capsys.readouterr().out


def test_a_wheel_finds_the_configs_that_lie_inside_it(tmp_path: Path) -> None:
    """As pyproject.toml packs it: configs/ inside the package, none beside it."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    shutil.copytree(ROOT / "mingpt", site / "mingpt", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", site / "mingpt" / "configs")
    elsewhere.mkdir()
    # A value that only this copy has shows that it is the one which was read.
    yaml = site / "mingpt" / "configs" / "train.yaml"
    yaml.write_text(f"{yaml.read_text()}train:\n  max_steps: 1234\n")
    done = train(elsewhere, "--cfg", "job", path=site)
    assert (done.returncode, done.stderr) == (0, "")
    assert "max_steps: 1234\n" in done.stdout
    assert os.listdir(elsewhere) == []
