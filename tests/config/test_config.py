"""mingpt.config.schema and configs/: every file composes, and nothing is in one that the other does not know."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from pydantic.fields import FieldInfo

from config_kit import configured, problems
from mingpt.config import compose
from mingpt.config.groups import config_dir
from mingpt.config.keys import KINDS, keys, named, schema_of
from mingpt.config.schema import Config
from mingpt.config.section import MISSING
from mingpt.config.stored import evaluation_config
from mingpt.config.validation import validate
from mingpt.errors import UserError
from mingpt.redact import without_secrets
from told import Told

TEXT = "data.path=text.txt"  # some options leave it open
OWN = {"model": "model._target_=examples.classifier.Classifier", "data": "data._target_=examples.classifier.rows"}
OPEN = {
    "model=own": (OWN["model"],),
    "data=own": (OWN["data"],),
    **dict.fromkeys(("data=addition", "data=sort", "data=random", "experiment=classifier", "experiment=synthetic"), ()),
    "experiment=finetune": (TEXT, "model.init_from=gpt2"),
}
FILES = sorted(config_dir().glob("*/*.yaml"))


def value(config: Config, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def stem(path: Path) -> str:
    return f"{path.parent.name}={path.stem}"


def config_of(file: Path) -> Config:
    return configured(stem(file), *OPEN.get(stem(file), (TEXT,)))


def yaml_of(path: Path) -> DictConfig:
    loaded = OmegaConf.load(path)
    assert isinstance(loaded, DictConfig)
    return loaded


def said(file: Path) -> dict[str, Any]:
    """The keys that a file sets, but the one that names its option."""
    yaml: dict[str, Any] = OmegaConf.to_container(yaml_of(file))  # type: ignore[assignment]
    yaml.pop("defaults", None)
    group = file.parent.name
    sections = {group: yaml} if group in compose.groups() and group != "experiment" else yaml
    flat = {f"{s}.{k}": v for s, held in sections.items() if isinstance(held, dict) for k, v in held.items()}
    flat |= {key: v for key, v in sections.items() if not isinstance(v, dict)}
    return {k: v for k, v in flat.items() if k not in ("model.kind", "data.kind", "schedule.kind", "optimizer.name")}


def field_of(key: str, raw: dict[str, Any]) -> FieldInfo:
    section, _, name = key.rpartition(".")
    return named(schema_of(section, raw))[name]


@pytest.mark.parametrize("file", [*FILES, config_dir() / "train.yaml"], ids=stem)
def test_a_file_composes_and_holds_only_what_differs_from_the_schema(file: Path) -> None:
    """A default is repeated only where another group's option sets the key."""
    config = config_of(file) if file in FILES else configured()
    raw = {section: {"kind": value(config, f"{section}.kind")} for section in KINDS}
    by_options = {key for f in FILES if f.parent.name not in ("experiment", file.parent.name) for key in said(f)}
    ours = keys(raw).keys() - by_options
    assert [k for k, v in said(file).items() if k in ours and v == field_of(k, raw).get_default()] == []


def test_no_two_experiments_have_one_name() -> None:
    """A run is found by its name: the second would go on where the first ended."""
    names = [config_of(file).run.name for file in FILES if file.parent.name == "experiment"]
    assert len({*names, configured().run.name}) == len(names) + 1


def test_gpt2_124m_is_gpt2_and_runs_unedited_on_four_nodes_of_four_gpus() -> None:
    config = configured("experiment=gpt2_124m", "data.path=data/fineweb-edu", world_size=16)
    microbatches = config.batch.global_size // config.batch.micro_size
    assert microbatches >= 16
    assert microbatches & (microbatches - 1) == 0  # a power of two: every share is a whole subtree of the sum
    assert config.model == configured("model=gpt2").model
    assert -(-50257 // value(config, "model.vocab_multiple")) * value(config, "model.vocab_multiple") == 50304
    assert value(config, "data.stride") == config.model.block_size
    assert config.train.max_steps * config.batch.global_size * config.model.block_size == pytest.approx(10e9, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # The promised defaults, in the YAML and in the schema.
        ("~train.threads ~reduce ~precision", {"train.threads": 1, "reduce": "exact", "precision": "fp32"}),
        ("run.dir=s3://b/x", {"snapshot.dir": "s3://b/x/snapshots"}),
        # Groups, and keys, which win wherever they stand.
        ("model.n_layer=1 model=gpt2", {"model.n_layer": 1, "model.n_embd": 768}),
        ("experiment=gpt2_124m data.path=x", {"precision": "bf16", "model.n_layer": 12, "data.kind": "shards"}),
        ("experiment=shakespeare_char model=gpt-nano seed=7 ++seed=8", {"model.n_layer": 3, "seed": 8}),
        # An interpolation follows the command line.
        ("train.max_steps=77 seed=${train.threads}", {"schedule.decay_steps": 77, "seed": 1}),
        ("train.max_steps='${oc.decode:${oc.env:MAX}}'", {"train.max_steps": 7}),
        # A deleted key is as if nobody had said it, whatever it holds.
        ("experiment=mnist ~train.max_steps", {"train.max_steps": 1000, "schedule.decay_steps": 1000}),
        ("~batch ++batch.micro_size=8", {"batch.micro_size": 8, "batch.global_size": 64}),
        ("model=gpt2 ~model.n_layer", {"model.n_layer": 4}),
        ("experiment=gpt2_124m data.path=x model=gpt-micro ~data.stride", {"data.stride": 1}),
    ],
)
def test_what_a_command_line_makes(
    arguments: str, expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX", "7")
    config = configured(*arguments.split())
    assert {key: value(config, key) for key in expected} == expected


@pytest.mark.parametrize(("section", "kind"), [(section, kind) for section in KINDS for kind in KINDS[section]])
def test_an_option_of_a_kinds_name_and_the_kind_itself_have_the_schemas_defaults(section: str, kind: str) -> None:
    fields = named(KINDS[section][kind])
    required = {name for name, field in fields.items() if field.get_default() == MISSING or name in ("path", "mix")}
    values = {"mix": "{web: {path: x}}"}
    given = [OWN[section]] if kind == "own" else [f"{section}.{name}={values.get(name, 'x')}" for name in required]
    config = configured(f"{section}={kind}", "model.block_size=64", *given)
    assert config == configured(*reversed(given), f"{section}.kind={kind}", "model.block_size=64")
    free = fields.keys() - required - {"_target_", "block_size", "template"}  # of a new run, not of a stored config
    assert {key: value(config, f"{section}.{key}") for key in free} == {key: fields[key].get_default() for key in free}


def test_code_of_ones_own_may_have_arguments_of_another_kinds_names() -> None:
    given = ("data=own", "data._target_=examples.classifier.rows", "+data.n_in=10", "+model.hidden=2", "+model.n_in=10")
    config = configured(
        *given, "model._target_=examples.classifier.Classifier", "+model.classes=2", "+model.dropout=0.5"
    )
    assert config.model.model_dump()["dropout"] == 0.5


def test_the_microbatches_grow_with_the_processes_if_the_user_says_so() -> None:
    assert configured("batch.per_process_size=32", world_size=8).global_size(8) == 256
    assert configured(world_size=4).global_size(4) == 64


def test_validate_fills_what_is_missing_and_refuses_what_is_unknown() -> None:
    assert validate({}).train.max_steps == 1000
    with pytest.raises(UserError, match=r"^trains is not a key"):
        validate({"trains": {}})


URLS = (
    "s3://bucket/key",
    "s3://user:password@bucket/key",
    "https://user:p@ss@host:8/x?sig=abc&y=1",
    "https://user@host/x",
    "gs://bucket/user@example.com/x",
    "simplecache::s3://user:password@bucket/key",
    "/data/a@b:c?d.txt",
    "http://[x/y",  # only looks like one
)


def test_a_shown_url_has_no_secrets_and_all_else(told: Told) -> None:
    told(map(without_secrets, URLS))
    assert without_secrets({"a": {"b": URLS[1], "c": 1}}) == {"a": {"b": without_secrets(URLS[1]), "c": 1}}


def test_the_printed_config_is_yaml_without_secrets() -> None:
    config = configured("data.path='https://me:secret@host/x?sig=secret'", "optimizer.lr=1e-3")
    assert value(config, "data.path") == "https://me:secret@host/x?sig=secret"
    shown = OmegaConf.to_container(OmegaConf.create(compose.as_yaml(config)))
    assert shown == config.model_dump() | {"data": config.data.model_dump() | {"path": "https://***@host/x?***"}}


@pytest.mark.parametrize("argument", ["~data.path", "~data", "data=text", "data.kind=text"])
def test_a_text_is_never_chosen_by_the_schema(argument: str) -> None:
    """Else a program that works on a snapshot would read another text than the snapshot's."""
    stored = {"model": {"kind": "gpt"}, "data": {"kind": "text", "path": "book.txt"}}
    if argument != "data.kind=text":
        assert problems(argument) == ["data.path: not set: give data.path=…"]
    if argument != "data=text":
        with pytest.raises(UserError, match=r"data\.path: not set"):
            evaluation_config(stored, "run", [argument], 1)


def test_a_strangers_key_forges_no_line() -> None:
    stored = {"model": {"kind": "gpt"}, "data": {"kind": "text", "path": "book.txt", "x\nerror: all well": "/etc"}}
    with pytest.raises(UserError) as mistake:
        evaluation_config(stored, "run", [], 1)
    assert [problem for problem in mistake.value.problems if "\n" in problem] == []
