"""What users of Hydra expect: configs of one's own, --info, and a sentence for what is not there."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mingpt
from config_kit import configured, problems
from mingpt.config import compose
from mingpt.gone import KEYS

MINE = "# @package _global_\n# My run\nrun:\n  name: mine\nmodel:\n  n_layer: 2\n"

SEED = "seed=-1: must be greater than or equal to 0"


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
    assert problems(where.format(own), "experiment=nope")[0].endswith("mnist, shakespeare_10m, "
        "shakespeare_char, shakespeare_gpt2, synthetic")  # fmt: skip
    assert "mine" in problems(where.format(own), "experiment=nope")[0]


def test_a_config_of_ones_own_is_begun_with(own: Path) -> None:
    config = configured("--config-dir", "conf", "--config-name", "start", "seed=7")
    assert (config.seed, config.model.model_dump()["n_embd"]) == (7, 8)
    assert configured("--config-dir=conf", "--config-name=start").seed == 5
    [problem] = problems("--config-dir=conf", "--config-name=nope")
    assert problem.startswith("--config-name=nope: Cannot find primary config 'nope'")


def test_both_ways_at_once(own: Path, tmp_path: Path) -> None:
    (tmp_path / "more/experiment").mkdir(parents=True)
    (tmp_path / "more/experiment/other.yaml").write_text(MINE.replace("mine", "other"))
    more = f"hydra.searchpath=['file://{tmp_path}/more']"
    assert configured("--config-dir=conf", more, "experiment=other", "model=tiny").run.name == "other"


def test_a_folder_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    assert problems("--config-dir=/nowhere", "seed=-1") == [
        "--config-dir=/nowhere: there is no such folder: check the spelling",
        "seed=-1: must be greater than or equal to 0",
    ]
    assert problems("hydra.searchpath=[file:///nowhere]") == [
        "hydra.searchpath: there is no folder file:///nowhere: check the spelling"
    ]
    assert problems("hydra.searchpath=conf") == [
        "hydra.searchpath=conf: write a list of places: hydra.searchpath=[file:///folder]"
    ]


def test_help_lists_ones_own_options(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compose.configure(["--config-dir=conf", "--help"]) is None
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"mine My run", "tiny A tiny one", "book My book"} <= set(lines)
    assert "gpt2 GPT-2, 124M parameters: 12 layers, width 768" in lines


def test_help_says_each_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert compose.configure(["--help"]) is None
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    for key, default in {
        "seed": "(1)",
        "train.compile": "(false)",
        "snapshot.dir": "(${run.dir}/snapshots)",
        "batch.per_process_size": "(null)",
        "schedule.decay_steps": "(${train.max_steps})",
        "train.freeze": "([])",
    }.items():
        assert lines[key].endswith(f" {default}")


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Hydra's --info sets up logging, to an output that is closed after the test."""
    loggers = [logging.getLogger(), logging.getLogger("hydra")]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("searchpath", ["/conf"]),
        ("defaults", ["experiment/mine"]),
        ("defaults-tree", ["  train:", "model: tiny"]),
        ("plugins", ["Hydra Plugins"]),
    ],
)
def test_info(own: Path, what: str, expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    secret = "data.path='https://me:hunter2@host/x'"
    arguments = ["--config-dir=conf", "experiment=mine", "model=tiny", secret, "--info", what]
    assert compose.configure(arguments) is None
    told = capsys.readouterr().out
    assert [text for text in expected if text not in told] == []
    assert "hunter2" not in told


@pytest.mark.parametrize(
    "program", [["train", "--cfg", "job"], ["launch", "--dry-run"], ["preflight", "--seconds", "1"]]
)
def test_each_program_knows_the_folder(own: Path, program: list[str]) -> None:
    module, *options = program
    command = [sys.executable, "-m", f"mingpt.{module}", *options, "--config-dir", "conf", "experiment=nope"]
    root = Path(mingpt.__file__).parent.parent
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout) == (64, "")
    assert "there is no experiment 'nope'; there are" in done.stderr
    assert "mine" in done.stderr


def test_the_launcher_hands_on_the_folder_whatever_folder_its_workers_are_in(own: Path) -> None:
    from mingpt.launch.torchrun import Torchrun, parse

    options = parse(["--nproc-per-node=1", "--config-dir", "conf", "--config-name", "start", "experiment=mine"])
    node = Torchrun.compose(options, {})
    assert node.overrides == (f"--config-dir={own}", "--config-name=start", "experiment=mine")
    os.chdir("/")
    config = configured(*json.loads(json.dumps(node.overrides)))
    assert (config.run.name, config.seed) == ("mine", 5)


@pytest.mark.parametrize("option", ["--multirun", "-m", "--package=model", "--hydra-help", "--config-path=x"])
def test_what_is_not_there_is_answered_with_a_sentence(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        compose.configure(["seed=1", option])
    assert exit_.value.code == 64
    error = capsys.readouterr().err
    assert error.startswith(f"error: unrecognized arguments: {option}: ")
    assert error.count("\n") == 1


def test_settings_of_hydras_own_are_answered_with_the_other_mistakes() -> None:
    assert problems("hydra.run.dir=/x", "seed=1,2", "seed=-1") == [
        "hydra.run.dir=/x: not used here: set run.dir=…",
        "seed=1,2: a sweep over values is for `mingpt sweep`: give one, or a list as key=[a,b]",
        SEED,
    ]


def test_what_is_gone_says_what_to_use_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key, an option of a group, a word of a key; with all other problems."""
    for name in ("train.old", "model=old", "data.kind=old"):
        monkeypatch.setitem(KEYS, name, f"use {name}_new")
    told = [f"{name} is gone: use {name}_new" for name in ("model=old", "train.old", "data.kind=old")]
    assert sorted(problems("model=old", "train.old=1", "data.kind=old", "seed=-1")) == sorted([*told, SEED])


def test_a_key_without_its_section_is_found() -> None:
    names = ("optimizer.lr", "optimizer.weight_decay", "world.device", "train.max_steps", "model.dropout")
    short = {key.partition(".")[2]: key for key in names}
    assert problems(*(f"{name}=1" for name in short)) == [
        f"{name} is not a key (did you mean {key}?)" for name, key in short.items()
    ]


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("pkg://nonexist.mod", "there is no package pkg://nonexist.mod: check the spelling"),
        ("pkg://nonexist", "there is no package pkg://nonexist: check the spelling"),
        ("s3://conf", "s3://conf: configs are read from file:///folder and pkg://package only"),
        ("s3://user:hunter2@b", "s3://***@b: configs are read from file:///folder and pkg://package only"),
    ],
)
def test_a_place_that_is_none_is_a_mistake(own: Path, place: str, problem: str) -> None:
    assert problems(f"hydra.searchpath=['{place}']") == [f"hydra.searchpath: {problem}"]


@pytest.mark.parametrize("argument", ["--config-dir={}", "--config-name={}", "hydra.searchpath={}"])
def test_a_password_in_a_place_is_not_shown(argument: str) -> None:
    told = "".join(problems(argument.format("'s3://user:hunter2@b'")))
    assert "hunter2" not in told
    assert "***@b" in told


def test_what_can_not_be_read_is_passed_over(own: Path) -> None:
    (own / "experiment/.#mine.yaml").symlink_to("nobody@nowhere.1")
    (own / "experiment/lost.yaml").symlink_to("gone.yaml")
    (own / "experiment/folder.yaml").mkdir()
    assert configured("--config-dir=conf", "experiment=mine").run.name == "mine"
    there_are = problems("--config-dir=conf", "experiment=nope")[0]
    assert [name for name in (".#mine", "lost", "folder") if name in there_are] == []


def test_the_launcher_says_what_to_do_without_sweeps(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mingpt.launch.torchrun import parse

    with pytest.raises(SystemExit):
        parse(["--nproc-per-node=1", "--multirun", "seed=1"])
    assert "that is `mingpt sweep` (docs/sweeps.md): write this in its place" in capsys.readouterr().err
