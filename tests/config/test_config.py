"""mingpt.config.schema and configs/: every file composes, and what a command line makes of them."""

from operator import attrgetter
from pathlib import Path

import pytest

from mingpt.cli.redact import without_secrets
from mingpt.compose.groups import config_dir
from mingpt.compose.stored import evaluation_config
from mingpt.config.keys import KINDS, named
from mingpt.config.schema import Config
from mingpt.config.section import MISSING
from mingpt.errors import UserError
from tests.kits.config_kit import configured, problems

TEXT = "data.path=text.txt"  # some options leave it open
OWN = {"model": "model._target_=examples.classifier.Classifier", "data": "data._target_=examples.classifier.rows"}
OPEN = {
    "model=own": (OWN["model"],),
    "data=own": (OWN["data"],),
    **dict.fromkeys(("data=random", "experiment=classifier", "experiment=synthetic"), ()),
    "experiment=finetune": (TEXT, "model.init_from=gpt2"),
}
FILES = sorted(config_dir().glob("*/*.yaml"))


def config_of(file: Path) -> Config:
    option = f"{file.parent.name}={file.stem}"
    return configured(option, *OPEN.get(option, (TEXT,)))


def test_every_file_composes_and_no_two_experiments_have_one_name() -> None:
    """A run is found by its name: the second would go on where the first ended."""
    runs = {file: config_of(file).run.name for file in FILES}
    names = [name for file, name in runs.items() if file.parent.name == "experiment"]
    assert len({*names, configured().run.name}) == len(names) + 1


def test_gpt2_124m_is_gpt2_and_runs_unedited_on_four_nodes_of_four_gpus() -> None:
    config = configured("experiment=gpt2_124m", "data.path=data/fineweb-edu", world_size=16)
    microbatches = config.batch.global_size // config.batch.micro_size
    assert microbatches & (microbatches - 1) == 0  # a power of two: every share is a whole subtree of the sum
    assert config.model == configured("model=gpt2").model
    assert config.train.max_steps * config.batch.global_size * config.model.block_size == pytest.approx(10e9, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # The promised defaults, in the YAML and in the schema.
        ("~train.threads ~reduce ~precision", {"train.threads": 1, "reduce": "exact", "precision": "fp32"}),
        ("run.dir=s3://b/x", {"snapshot.dir": "s3://b/x/snapshots"}),
        # Groups, and keys, which win wherever they stand.
        ("model.n_layer=1 model=gpt2", {"model.n_layer": 1, "model.n_embd": 768}),
        ("experiment=shakespeare_char model=gpt-nano seed=7 ++seed=8", {"model.n_layer": 3, "seed": 8}),
        # An interpolation follows the command line.
        ("train.max_steps=77 seed=${train.threads}", {"schedule.decay_steps": 77, "seed": 1}),
        ("train.max_steps='${oc.decode:${oc.env:MAX}}'", {"train.max_steps": 7}),
        # A deleted key is as if nobody had said it, whatever it holds.
        ("experiment=mnist ~train.max_steps", {"train.max_steps": 1000, "schedule.decay_steps": 1000}),
        ("experiment=gpt2_124m data.path=x model=gpt-micro ~data.stride", {"data.stride": 1}),
    ],
)
def test_what_a_command_line_makes(
    arguments: str, expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX", "7")
    config = configured(*arguments.split())
    assert {key: attrgetter(key)(config) for key in expected} == expected


@pytest.mark.parametrize(("section", "kind"), [(section, kind) for section in KINDS for kind in KINDS[section]])
def test_an_option_of_a_kinds_name_and_the_kind_itself_have_the_schemas_defaults(section: str, kind: str) -> None:
    fields = named(KINDS[section][kind])
    required = {name for name, field in fields.items() if field.get_default() == MISSING or name in ("path", "mix")}
    values = {"mix": "{web: {path: x}}"}
    given = [OWN[section]] if kind == "own" else [f"{section}.{name}={values.get(name, 'x')}" for name in required]
    assert configured(f"{section}={kind}", "model.block_size=64", *given) == configured(
        *reversed(given), f"{section}.kind={kind}", "model.block_size=64"
    )


def test_the_microbatches_grow_with_the_processes_if_the_user_says_so() -> None:
    # batch.global_size is out of the game then.
    assert configured("batch.per_process_size=16", "batch.global_size=65", world_size=100).global_size(100) == 1600
    assert configured(world_size=4).global_size(4) == 64


URLS = {  # and how they are shown
    "s3://bucket/key": "s3://bucket/key",
    "s3://user:password@bucket/key": "s3://***@bucket/key",
    "https://user:p@ss@host:8/x?sig=abc&y=1": "https://***@host:8/x?***",
    "https://user@host/x": "https://***@host/x",
    "gs://bucket/user@example.com/x": "gs://bucket/user@example.com/x",
    "simplecache::s3://user:password@bucket/key": "simplecache::s3://***@bucket/key",
    "/data/a@b:c?d.txt": "/data/a@b:c?d.txt",
    "http://[x/y": "http://[x/y",  # only looks like one
}


def test_a_shown_url_has_no_secrets_and_all_else() -> None:
    assert {url: without_secrets(url) for url in URLS} == URLS
    assert without_secrets({"a": {"b": "s3://u:p@b/k", "c": 1}}) == {"a": {"b": "s3://***@b/k", "c": 1}}


def test_a_text_is_never_chosen_by_the_schema() -> None:
    """Else a program that works on a snapshot would read another text than the snapshot's."""
    for argument in ("~data.path", "~data", "data=text"):
        assert problems(argument) == ["data.path: not set: give data.path=…"]
    stored = {"model": {"kind": "gpt"}, "data": {"kind": "text", "path": "book.txt"}}
    for argument in ("~data.path", "~data", "data.kind=text"):
        with pytest.raises(UserError, match=r"data\.path: not set"):
            evaluation_config(stored, "run", [argument], 1)
