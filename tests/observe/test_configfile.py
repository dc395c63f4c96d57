"""What a start says of its config in one line, and the file that holds all of it."""

import re
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
import yaml

from mingpt.config.configfile import overrides_line, read_config, write_config
from mingpt.errors import USER_ERROR, UserError
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from tests.kits.branch_kit import train
from tests.kits.config_kit import configured
from tests.kits.run_kit import TINY


def test_a_start_says_what_was_set_and_the_file_says_all(
    tmp_path: Path, text: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", text, cache, "optimizer.lr=0.02")
    out = capsys.readouterr().out
    for word in (*TINY[:3], f"run.dir={tmp_path}/run", f"data.path={text}", "train.max_steps=12", "optimizer.lr=0.02"):
        assert re.search(rf"^config: .*\b{word}( |$)", out, re.M)
    stored = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    found = (stored["optimizer"]["lr"], stored["train"]["max_steps"], stored["schedule"]["decay_steps"])
    assert found == (0.02, 12, 24)
    # A start that is refused leaves it as it was.
    again = (f"--config-dir={tmp_path}/run", "--config-name=config", "optimizer.lr=0.03", "train.max_steps=13")
    assert attempt([*again], Lifetime()) == USER_ERROR
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text()) == stored


def test_no_secret_is_in_the_line() -> None:
    target = "data._target_=examples.classifier.rows"
    given = ["experiment=classifier", target, "data.count=9", "run.dir=s3://key:hidden@bucket/run", "~schedule.kind"]
    config = configured(*given)
    shown = f"experiment=classifier {target} data.count=9 run.dir=s3://***@bucket/run schedule.kind=cosine"
    assert overrides_line(given, config) == f"config: {shown}"
    assert overrides_line(["data={password: hidden}", "+data.x={token: hidden}"], config) == "config: data data.x"
    assert overrides_line([], config) == "config: the defaults"


def test_the_file_is_there_in_a_bucket_and_no_failure_ends_a_run(tmp_path: Path) -> None:
    place, said = f"memory://{uuid4().hex}/run", list[str]()
    (tmp_path / "run").write_text("a file where a folder should be")
    for run_dir in (place, f"{tmp_path}/run"):
        write_config(configured(f"run.dir={run_dir}"), said.append)
    with fsspec.open(f"{place}/config.yaml", "rt") as f:
        assert yaml.safe_load(f)["run"]["dir"] == place
    [line] = said
    assert line.startswith("config.yaml can't be written: ")


@pytest.mark.parametrize(
    "hostile",
    [
        "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
        "a: " + "{b: " * 40 + "1" + "}" * 40,
        "a: !!python/object/apply:os.getcwd []",
        "a: x\nb: \xff",
    ],
)
def test_a_strangers_yaml_has_no_aliases_no_code_and_an_end(
    tmp_path: Path, hostile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_config(str(tmp_path)) is None
    assert not capsys.readouterr().err
    (tmp_path / "config.yaml").write_bytes(hostile.encode("latin-1"))
    assert read_config(str(tmp_path)) is None
    assert capsys.readouterr().err == f"{tmp_path}/config.yaml: no config can be read from it: it is left out\n"
    (tmp_path / "config.yaml").write_text("a: " + "x" * 2**18)
    with pytest.raises(UserError, match=r"config\.yaml has more than"):
        read_config(str(tmp_path))
