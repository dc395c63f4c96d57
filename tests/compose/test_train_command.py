"""`mingpt train` as its users and launchers see it: exit codes, stdout, stderr, and no folder left behind."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mingpt.compose import compose
from mingpt.compose.commandline import CommandLine
from mingpt.compose.help import help_text
from mingpt.config.keys import leaves
from mingpt.config.validation import validate
from mingpt.errors import UserError
from tests.kits.config_kit import configured
from tests.kits.paths_kit import ROOT
from tests.kits.told import Told


@pytest.mark.usefixtures("logging_as_before")
def test_cfg_job_prints_the_config_or_the_problem_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["experiment=gpt2_124m", "data.path=s3://b/x", "optimizer.eps=1e-9", "run.name=one"]
    assert compose.printing(["--cfg", "job", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "  dir: ${run.dir}/snapshots\n" in printed
    assert validate(OmegaConf.to_container(OmegaConf.create(printed), resolve=True)) == compose.configure(arguments)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^run\.dir"):
        compose.printing(["--cfg", "job", "--resolve", "run.dir=${nope}"])
    assert capsys.readouterr().out == ""
    assert [*tmp_path.iterdir()] == []


def test_help_names_every_group_option_and_key_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert compose.printing(["--help"]) == 0
    out = capsys.readouterr().out
    assert out == help_text() + "\n"
    for file in (ROOT / "configs").glob("*/*.yaml"):
        [group] = re.findall(rf"^  {file.parent.name}/\n((?:    .*\n)+)", out, re.M)
        assert f"    {file.stem} " in group
    shown = dict(re.findall(r"^  ([a-z_0-9.]+) +\S.* \((\S*)\)$", out, re.M))
    taken = dict(leaves(configured("model=modern", "data=random", "data.vocabulary=9").model_dump()))
    assert taken.keys() - shown.keys() == {"model.kind", "data.kind"}
    for key, default in shown.items():  # of model and data each kind has its own; ${…} is filled in by then
        if not key.startswith(("model.", "data.")) and "$" not in default:
            assert taken[key] == default or taken[key] == json.loads(default), key
    assert "reduce " in out
    assert " [exact | fast] (exact)\n" in out  # what a key takes
    of_kind = {kind: out.split(f"Keys of model.kind={kind} ")[1].split("\n\n")[0] for kind in ("gpt", "modern")}
    assert {kind: "  model.n_kv_head " in text for kind, text in of_kind.items()} == {"gpt": False, "modern": True}


def test_a_terminal_that_lacks_a_character_is_told_all_the_rest() -> None:
    """What follows from here on, too: a training's log must not end at the first `…`."""
    script = "from mingpt.cli.console import say; say('one …'); say('two')"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=600)
    assert done.stdout == b"one \\u2026\ntwo\n"


def test_an_option_may_have_underscores_and_a_key_no_dashes(capsys: pytest.CaptureFixture[str], told: Told) -> None:
    line = CommandLine.of(["--config_name=mine", "seed=3"])
    assert (line.name, len(line.overrides)) == ("mine", 1)
    for option in ("--learning_rate=1e-3", "--max_step=5", "--train.max_steps=5", "--nothing_like_it", "--nope"):
        with pytest.raises(SystemExit) as end:
            compose.configure([option])
        assert end.value.code == 64
    out, err = capsys.readouterr()
    assert out == ""
    told(err)
