"""What a start says of its config in one line, and the file that holds all of it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
import torch
import yaml

from mingpt.config import compose
from mingpt.config.configfile import overrides_line, write_config
from mingpt.errors import FINISHED, USER_ERROR
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from run_kit import TINY


@pytest.fixture
def train(tmp_path: Path, text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    monkeypatch.setattr("mingpt.world.joining._exit_after", lambda seconds, code: None)
    threads = torch.get_num_threads()
    places = (f"run.dir={tmp_path}/run", f"data.path={text}", f"data.cache_dir={cache}")
    yield lambda *overrides: attempt([*TINY, *places, "train.max_steps=2", *overrides], Lifetime())
    torch.set_num_threads(threads)


def test_a_start_says_what_was_set_and_the_file_says_all(
    train: Callable[..., int], tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("optimizer.lr=0.02") == FINISHED
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if line.startswith("config: ")]
    told = dict(word.split("=", 1) for word in line.removeprefix("config: ").split())
    assert told == dict(word.split("=", 1) for word in TINY) | {
        "run.dir": f"{tmp_path}/run",
        "data.path": str(text),
        "data.cache_dir": told["data.cache_dir"],
        "snapshot.every_seconds": "0.0",
        "train.max_steps": "2",
        "optimizer.lr": "0.02",
    }
    stored = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert (stored["optimizer"]["lr"], stored["train"]["max_steps"]) == (0.02, 2)
    assert stored["schedule"]["decay_steps"] == 24
    # A start that is refused leaves it as it was.
    assert train("optimizer.lr=0.03", "train.max_steps=3") == USER_ERROR
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text()) == stored


def test_no_secret_is_in_the_line() -> None:
    target = "data._target_=examples.classifier.rows"
    given = ["experiment=classifier", target, "data.count=9", "run.dir=s3://key:hidden@bucket/run", "~schedule.kind"]
    config = compose.configure(given)
    assert config is not None
    shown = f"experiment=classifier {target} data.count=9 run.dir=s3://***@bucket/run schedule.kind=cosine"
    assert overrides_line(given, config) == f"config: {shown}"
    assert overrides_line(["data={password: hidden}", "+data.x={token: hidden}"], config) == "config: data data.x"
    assert overrides_line([], config) == "config: the defaults"


def test_the_file_is_there_in_a_bucket_and_no_failure_ends_a_run(tmp_path: Path) -> None:
    place, said = f"memory://{uuid4().hex}", list[str]()
    config = compose.configure([f"run.dir={place}/run"])
    assert config is not None
    write_config(config, said.append)
    assert said == []
    with fsspec.open(f"{place}/run/config.yaml", "rt") as f:
        assert yaml.safe_load(f)["run"]["dir"] == f"{place}/run"
    (tmp_path / "run").write_text("a file where a folder should be")
    config = compose.configure([f"run.dir={tmp_path}/run"])
    assert config is not None
    write_config(config, said.append)
    [line] = said
    assert line.startswith("config.yaml can't be written: ")
    assert line.endswith(" The run goes on.")
