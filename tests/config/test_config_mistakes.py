"""Every mistake in a command line is listed, each in a line that names the key and what to do: tests/messages.txt."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mingpt.compose import compose
from mingpt.compose.groups import groups
from mingpt.config.checks import no_weights
from mingpt.config.keys import keys
from mingpt.errors import USER_ERROR, UserError
from mingpt.files.storage import FETCHED
from mingpt.prepare.corpora import CORPORA, DATASETS
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from tests.kits.config_kit import problems
from tests.kits.paths_kit import ROOT
from tests.kits.told import Told


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to start in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        # A key that does not exist, with the nearest one that does.
        "batch.micro_siz=8",
        "n_head=4",
        "~seed=7",
        "~track",
        "hydra.job.name=x",
        "+experiment=gpt2_124m",
        # A value out of range, of a wrong type, or not one of the words.
        "batch.micro_size=0",
        "batch.micro_size=auto",
        "model.dropout=1",
        "optimizer.lr=nan",
        "seed=9223372036854775808",
        "model.n_layer=abc",
        "run.name=a/b",
        "reduce=exat",
        "train.max_steps=${oc.env:MAX}",
        # Combinations.
        "batch.per_process_size=20",
        "world.device=mps",
        "batch.double_at=[4,2]",
        "batch.double_at=[2,4] batch.micro_size=2",
        "world.device=cpu world.backend=nccl",
        "schedule=wsd schedule.cooldown_steps=50 train.max_steps=10",
        # Groups, sections, interpolations, grammar.
        "model=null",
        "=3",
        "run.dir=s3://b/d=1",
        "data=char data.path=é.txt",
        "data=char data.path=~/book.txt",
        "run.name=123",
        "run.name=null",
        "data=sort",
        "data.kind=sort",
        "train.max_steps = 5",
        "train.max_steps =5 seed= 3",
        "README.md",
        "track=wandb",
        "optimizer.lr=${oc.env:NOLR}",
        "learning_rate=1e-3",
        # Kinds of data: each has keys of its own.
        "data.kind=txt data.path=3 seed=-1",
        "data=shards data.path=x +data.tokens=char",
        "data.tokens=bpe",
        "data.kind=${oc.env:NOPE}",
        "data=shards",
        # A file and the command line set the same key: once.
        "experiment=gpt2_124m data=random data.path=x data.stride=4",
        # schedule.decay_steps and snapshot.dir follow these keys: their problems are the same one again.
        "train.max_steps=0",
        # In a circle, each key's problem seems to be the next one's: none of them may be hidden for that.
        "run.dir=${run.dir}/x",
        "seed=${train.threads} train.threads=${seed}",
        # Several at once. A combination is passed over where one of its keys is mistyped already.
        "model=gpt3 schedule=cos model.n_head=7",
        "batch.global_size=65 model.n_head=5 precision=fp63 train.max_step=4 ( +new=1 data.cache_dir=${nope}",
        "hydra.run.dir=/x seed=1,2 seed=-1",
        "--config-dir=/nowhere seed=-1",
        "hydra.searchpath=['pkg://nonexist']",
        "hydra.searchpath=['s3://user:hunter2@b']",
        "--config-name=s3://user:hunter2@b",
    ],
)
def test_a_bad_command_line_gives_exactly_its_problems(
    arguments: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX", "7")
    monkeypatch.chdir(ROOT)
    told(problems(*arguments.split()))


def test_an_argument_longer_than_a_files_name_is_no_file() -> None:
    (problem,) = problems("x" * 300)
    assert problem.endswith("is not an override: write key=value, group=option, +key=value or ~key")


@pytest.mark.parametrize(
    "arguments",
    [
        "experiment=shakespeare_char",
        "experiment=mnist",
        "experiment=cifar10",
        "experiment=gpt2_124m",
        "experiment=gpt2_124m data.path=data/fineweb-edu",
        "experiment=finetune",
        "experiment=finetune data.path=mine.txt",
    ],
)
def test_what_a_new_user_lacks_is_told_with_what_brings_it(
    arguments: str, here: Path, capsys: pytest.CaptureFixture[str], told: Told
) -> None:
    assert attempt(arguments.split(), Lifetime()) == USER_ERROR
    told(capsys.readouterr().err)
    assert not any(here.iterdir())


def test_what_can_be_fetched_is_what_fetch_writes() -> None:
    texts = {(f"data/{text.name}", name) for name, corpus in CORPORA.items() for text in corpus.texts}
    files = texts | {(f"data/{name}", name) for name in DATASETS}
    for place, name in FETCHED.items():
        assert any(fetched == name and f"{file}/".startswith(f"{place}/") for file, fetched in files)
    assert set(FETCHED.values()) == CORPORA.keys() | DATASETS.keys()


def test_a_run_is_exported_before_another_starts_from_it(here: Path, told: Told) -> None:
    (here / "runs/cc/snapshots").mkdir(parents=True)
    told(no_weights("runs/cc"))


PIECES = [*keys(), *groups(), *"=+~.,:${}[]()'\"\\@/ \nä1", "++", "null", "???", "1e3", "${run.name}", "hydra"]


@settings(max_examples=20, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join))
@example("seed=1")
@example("+snapshot=-,data")
@example("=1")
def test_whatever_is_typed_is_a_config_or_a_mistake(argument: str) -> None:
    with suppress(UserError):
        compose.configure([argument])
