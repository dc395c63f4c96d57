"""What users of Hydra expect: configs of one's own, and --info."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from config_kit import configured, problems
from mingpt.config import compose
from mingpt.launch.torchrun import Torchrun, parse
from mingpt.preflight import command as preflight

MINE = "# @package _global_\n# My run\nrun:\n  name: mine\nmodel:\n  n_layer: 2\n"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a project beside ours: an experiment, a model, data, and a config to begin with."""
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "experiment/mine": MINE,
        "model/tiny": "# A tiny one\nkind: gpt\nn_layer: 1\nn_head: 1\nn_embd: 8\n",
        "data/book": "# My book\nkind: text\npath: book.txt\n",
        "start": "defaults:\n  - train\n  - override model: tiny\n  - _self_\nseed: 5\n",
    }.items():
        (file := tmp_path / "conf" / f"{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return tmp_path / "conf"


@pytest.mark.parametrize("where", ["--config-dir=conf", "hydra.searchpath=[file://{}]"])
def test_configs_of_ones_own_are_found(own: Path, where: str) -> None:
    config = configured(where.format(own), "experiment=mine", "model=tiny", "data=book")
    assert (config.run.name, config.data.places()) == ("mine", {"data.path": "book.txt"})
    assert config.model.model_dump()["n_embd"] == 8
    assert config.model.model_dump()["n_layer"] == 2  # the experiment's
    there_are = problems(where.format(own), "experiment=nope")[0].replace(",", "").split()
    assert {"mine", "mnist"} <= {*there_are}


def test_a_config_of_ones_own_is_begun_with(own: Path) -> None:
    config = configured("--config-dir", "conf", "--config-name", "start", "seed=7")
    assert (config.seed, config.model.model_dump()["n_embd"]) == (7, 8)
    assert configured("--config-dir=conf", "--config-name=start").seed == 5


def test_both_ways_at_once(own: Path, tmp_path: Path) -> None:
    (tmp_path / "more/experiment").mkdir(parents=True)
    (tmp_path / "more/experiment/other.yaml").write_text(MINE.replace("mine", "other"))
    more = f"hydra.searchpath=['file://{tmp_path}/more']"
    assert configured("--config-dir=conf", more, "experiment=other", "model=tiny").run.name == "other"


def test_an_experiment_begins_with_its_package(own: Path) -> None:
    (own / "experiment/mine.yaml").write_text(MINE.partition("\n")[2])
    [problem] = problems("--config-dir=conf", "experiment=mine")
    assert "`# @package _global_`" in problem


def test_what_can_not_be_read_is_passed_over(own: Path) -> None:
    (own / "experiment/.#mine.yaml").symlink_to("nobody@nowhere.1")
    (own / "experiment/lost.yaml").symlink_to("gone.yaml")
    (own / "experiment/folder.yaml").mkdir()
    assert configured("--config-dir=conf", "experiment=mine").run.name == "mine"
    there_are = problems("--config-dir=conf", "experiment=nope")[0]
    assert [name for name in (".#mine", "lost", "folder") if name in there_are] == []


def test_help_lists_ones_own_options(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compose.configure(["--config-dir=conf", "--help"]) is None
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"mine My run", "tiny A tiny one", "book My book"} <= set(lines)


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Hydra's --info sets up logging, to an output that is closed after the test."""
    loggers = [logging.getLogger(), logging.getLogger("hydra")]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.mark.usefixtures("logging_as_before", "own")
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("searchpath", "/conf"),
        ("defaults", "experiment/mine"),
        ("defaults-tree", "model: tiny"),
        ("plugins", "Hydra Plugins"),
    ],
)
def test_info(what: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "data.path='https://me:hunter2@host/x'"
    arguments = ["--config-dir=conf", "experiment=mine", "model=tiny", secret, "--info", what]
    assert compose.configure(arguments) is None
    printed = capsys.readouterr().out
    assert expected in printed
    assert "hunter2" not in printed


def test_the_launcher_hands_on_the_folder_whatever_folder_its_workers_are_in(own: Path) -> None:
    options = parse(["--nproc-per-node=1", "--config-dir", "conf", "--config-name", "start", "experiment=mine"])
    node = Torchrun.compose(options, {})
    assert node.overrides == (f"--config-dir={own}", "--config-name=start", "experiment=mine")
    os.chdir("/")
    config = configured(*json.loads(json.dumps(node.overrides)))
    assert (config.run.name, config.seed) == ("mine", 5)


def test_preflight_knows_the_folder(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight.main(["--config-dir", "conf", "experiment=nope"]) == 64
    assert " mine" in capsys.readouterr().err


def test_the_launcher_says_what_to_do_without_sweeps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="64"):
        parse(["--nproc-per-node=1", "--multirun", "seed=1"])
    assert "`mingpt train`" in capsys.readouterr().err
