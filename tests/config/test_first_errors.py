"""What a new user meets first: each of these messages says the cure, and all of them come at once."""

from pathlib import Path

import pytest

from config_kit import problems
from mingpt.config import compose
from mingpt.config.checks import no_weights
from mingpt.errors import USER_ERROR
from mingpt.prepare.corpora import CORPORA, DATASETS
from mingpt.storage import FETCHED
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to start in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert attempt([*arguments], Lifetime()) == USER_ERROR
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("experiment", "name"),
    [("shakespeare_char", "shakespeare"), ("shakespeare_10m", "shakespeare"), ("mnist", "mnist")],
)
def test_data_that_is_not_there_can_be_fetched(
    experiment: str, name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = told(capsys, f"experiment={experiment}")
    assert error.startswith("error: data.path=data/")
    assert error.endswith(f", or get it with `mingpt fetch {name}`\n")


def test_what_can_be_fetched_is_what_fetch_writes() -> None:
    files = {f"data/{text.name}": name for name, corpus in CORPORA.items() for text in corpus.texts}
    files |= {f"data/{name}": name for name in DATASETS}
    for place, name in FETCHED.items():
        assert name in {fetched for file, fetched in files.items() if file == place or file.startswith(f"{place}/")}
    assert set(FETCHED.values()) == CORPORA.keys() | DATASETS.keys()


def test_a_large_model_has_no_small_text_and_says_what_brings_a_large_one(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, "experiment=gpt2_124m").startswith(
        "error: data.path: Missing mandatory value: data.path: set it to shards: "
        "`mingpt fetch fineweb-edu --tokens 10B` writes data/fineweb-edu"
    )
    error = told(capsys, "experiment=gpt2_124m", "data.path=data/fineweb-edu")
    assert error.endswith(", or get it with `mingpt fetch fineweb-edu`\n")
    assert not any(here.iterdir())


def test_fine_tuning_lists_all_its_problems_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = (
        "data.tokenizer=data/gpt2: there is no such file or bucket: check the spelling, or get it with "
        "`mingpt fetch gpt2-vocabulary`"
    )
    weights = (
        "model.init_from=gpt2: there is no config.json: give a folder in Hugging Face's form, as save_pretrained "
        "writes it, for instance by `hf download openai-community/gpt2 --local-dir gpt2`"
    )
    first, *others = problems("experiment=finetune")
    assert first.startswith("data.path: Missing mandatory value")
    assert others == [tokenizer, weights]
    error = told(capsys, "experiment=finetune", "data.path=mine.txt")
    missing = "data.path=mine.txt: there is no such file or bucket: check the spelling"
    assert error == f"error: 3 problems:\n  1. {tokenizer}\n  2. {missing}\n  3. {weights}\n"


def test_a_run_is_exported_before_another_starts_from_it(here: Path) -> None:
    (here / "runs/cc/snapshots").mkdir(parents=True)
    assert no_weights("runs/cc").endswith(
        "there is no config.json, but a run of ours: export it first: mingpt export runs/cc FOLDER"
    )


def test_a_number_from_the_environment_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX", "7")
    assert problems("train.max_steps=${oc.env:MAX}") == [
        "train.max_steps='7': must be a valid integer; what comes from the environment is a text: write "
        "\"train.max_steps='${oc.decode:${oc.env:NAME}}'\""
    ]
    config = compose.configure(["train.max_steps='${oc.decode:${oc.env:MAX}}'"])
    assert config is not None
    assert config.train.max_steps == 7


def test_settings_of_hydras_own_programs_are_told() -> None:
    assert problems("hydra.run.dir=/x") == ["hydra.run.dir=/x: not used here: set run.dir=…"]


def test_an_experiment_without_its_first_line(here: Path) -> None:
    (here / "experiment").mkdir()
    (here / "experiment/mine.yaml").write_text("run:\n  name: mine\n")
    assert problems(f"hydra.searchpath=[file://{here}]", "experiment=mine") == [
        "the experiment's file must begin with the line `# @package _global_`: add it"
    ]
    (here / "experiment/mine.yaml").write_text("# @package _global_\nrun:\n  name: mine\n")
    config = compose.configure([f"hydra.searchpath=[file://{here}]", "experiment=mine"])
    assert config is not None
    assert config.run.name == "mine"
