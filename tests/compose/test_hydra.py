"""What users of Hydra expect: configs of one's own, and the options that print."""

import json
import os
from pathlib import Path

import pytest

from mingpt.cli.parsers import parse
from mingpt.compose import compose
from mingpt.launch.torchrun import Torchrun
from tests.kits.config_kit import configured, problems

MINE = "# @package _global_\n# My run\nrun:\n  name: mine\nmodel:\n  n_layer: 2\n"
FILES = {
    "experiment/mine": MINE,
    "model/tiny": "# A tiny one\nkind: gpt\nn_layer: 1\nn_head: 1\nn_embd: 8\n",
    "data/book": "# My book\nkind: text\npath: book.txt\n",
    "start": "defaults:\n  - train\n  - override model: tiny\n  - _self_\nseed: 5\n",
    "alone": "seed: 6\ndata:\n  path: book.txt\n",
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a project beside ours: an experiment, a model, data, and configs to begin with."""
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (file := tmp_path / "conf" / f"{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return tmp_path / "conf"


@pytest.mark.parametrize("where", ["--config-dir=conf", "hydra.searchpath=[file://{}]"])
def test_configs_of_ones_own_are_found(own: Path, where: str) -> None:
    config = configured(where.format(own), "experiment=mine", "model=tiny", "data=book")
    assert (config.run.name, config.data.places()) == ("mine", {"data.path": "book.txt"})
    assert config.model.model_dump()["n_embd"] == 8
    assert config.model.model_dump()["n_layer"] == 2  # the experiment's
    (own / "experiment/.#mine.yaml").symlink_to("nobody@nowhere.1")
    (own / "experiment/folder.yaml").mkdir()
    there_are = {*problems(where.format(own), "experiment=nope")[0].replace(",", "").split()}
    assert {"mine", "mnist", ".#mine", "folder"} & there_are == {"mine", "mnist"}


def test_a_config_of_ones_own_is_begun_with(own: Path) -> None:
    config = configured("-cd", "conf", "-cn", "start", "seed=7")
    assert (config.seed, config.model.model_dump()["n_embd"]) == (7, 8)
    config = configured("--config-path=conf", "--config-name=alone", "train.max_steps=7")  # without any of ours
    assert (config.seed, config.schedule.decay_steps, config.data.places()) == (6, 7, {"data.path": "book.txt"})


def test_an_experiment_begins_with_its_package(own: Path) -> None:
    (own / "experiment/mine.yaml").write_text(MINE.partition("\n")[2])
    [problem] = problems("--config-dir=conf", "experiment=mine")
    assert "`# @package _global_`" in problem


def test_a_byte_order_mark_changes_no_config(own: Path) -> None:
    """It hid the `# @package` of an experiment."""
    begins = ("--config-dir=conf", "experiment=mine", "model=tiny", "data=book"), ("-cd", "conf", "-cn", "start")
    before = [configured(*words) for words in begins]
    for file in own.rglob("*.yaml"):
        file.write_text(file.read_text(), encoding="utf-8-sig")
    assert [configured(*words) for words in begins] == before


@pytest.mark.usefixtures("logging_as_before", "own")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("-c job --resolve", "  path: https://***@host/x\n"),
        ("-c all --resolve", "    subdir: data.path-"),
        ("--info", "model/tiny"),
        ("-i defaults-tree", "experiment: mine"),
    ],
)
def test_what_prints_is_hydras_without_secrets(options: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    secrets = ("data.path='https://me:hunter2@host/x'", "health.notify=https://host/hunter2")
    more = ["--config-dir=conf", "experiment=mine", "model=tiny", *secrets, *options.split()]
    assert compose.printing(more) == 0
    printed = capsys.readouterr().out
    assert expected in printed
    assert "hunter2" not in printed


def test_the_launcher_hands_on_the_folder_whatever_folder_its_workers_are_in(own: Path) -> None:
    options = parse(
        "launch", ["--nproc-per-node=1", "--config-dir", "conf", "--config-name", "start", "experiment=mine"]
    )
    node = Torchrun.compose(options, {})
    assert node.overrides == (f"--config-dir={own}", "--config-name=start", "experiment=mine")
    os.chdir("/")
    config = configured(*json.loads(json.dumps(node.overrides)))
    assert (config.run.name, config.seed) == ("mine", 5)
