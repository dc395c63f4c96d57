"""mingpt.config.schema and configs/: every file composes, and nothing is in one that the other does not know."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from pydantic.fields import FieldInfo

from config_kit import configured, problems
from mingpt.config import compose
from mingpt.config.groups import config_dir
from mingpt.config.keys import KINDS, default, keys, named, schema_of
from mingpt.config.schema import Config
from mingpt.config.section import MISSING
from mingpt.config.stored import evaluation_config
from mingpt.config.validation import validate
from mingpt.errors import UserError
from mingpt.model.kinds.gpt import GPTModel
from mingpt.redact import without_secrets
from paths_kit import ROOT

TEXT = "data.path=text.txt"  # some options leave it open
OWN = {"model": "model._target_=examples.classifier.Classifier", "data": "data._target_=examples.classifier.rows"}
OPEN = {
    "model=own": (OWN["model"],),
    "data=own": (OWN["data"],),
    **dict.fromkeys(("data=addition", "data=sort", "data=random", "experiment=classifier", "experiment=synthetic"), ()),
    "experiment=finetune": (TEXT, "model.init_from=gpt2"),
}
FILES = sorted(config_dir().glob("*/*.yaml"))
# The keys that the issue promises to scripts.
PROMISED = {
    "": ("seed", "reduce", "precision"),
    "run.": ("dir", "name"),
    "train.": ("max_steps", "threads"),
    "batch.": ("global_size", "micro_size"),
    "snapshot.": ("dir", "every_steps", "every_seconds", "keep"),
    "data.": ("path",),
}


def value(config: Config, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def gpt(config: Config) -> GPTModel:
    assert isinstance(config.model, GPTModel)
    return config.model


def stem(path: Path) -> str:
    return f"{path.parent.name}={path.stem}"


def yaml_of(path: Path) -> DictConfig:
    loaded = OmegaConf.load(path)
    assert isinstance(loaded, DictConfig)
    return loaded


def test_the_groups_and_options_are_those_of_the_issue() -> None:
    options = {group: sorted(found) for group, found in compose.groups().items()}
    gpts = ["gopher-44m", "gpt-micro", "gpt-mini", "gpt-nano", "gpt2", "gpt2-large", "gpt2-medium", "gpt2-xl"]
    modern = ["modern", "modern-nano", "modern-135m", "modern-360m", "modern-0.6b", "modern-1b"]
    assert options["model"] == sorted([*gpts, *modern, "gpt", "own"])
    assert options["optimizer"] == ["adamw", "muon"]
    assert options["schedule"] == ["constant", "cosine", "linear", "wsd"]
    ours = ["cifar10", "classifier", "finetune", "gpt2_124m", "mnist", "shakespeare_10m", "synthetic"]
    ours += ["shakespeare_gpt2"]
    assert options["experiment"] == sorted([*ours, "shakespeare_char"])
    assert options.keys() == {"model", "data", "optimizer", "schedule", "snapshot", "experiment"}


@pytest.mark.parametrize("file", FILES, ids=stem)
def test_every_option_composes_and_has_a_line_of_help(file: Path) -> None:
    configured(stem(file), *OPEN.get(stem(file), (TEXT,)))
    assert compose.groups()[file.parent.name][file.stem] != ""


def said(file: Path) -> dict[str, Any]:
    """The keys that a file sets, but the one that names its option."""
    yaml: dict[str, Any] = OmegaConf.to_container(yaml_of(file))  # type: ignore[assignment]
    yaml.pop("defaults", None)
    group = file.parent.name
    sections = {group: yaml} if group in compose.groups() and group != "experiment" else yaml
    flat = {f"{s}.{k}": v for s, held in sections.items() if isinstance(held, dict) for k, v in held.items()}
    flat |= {key: v for key, v in sections.items() if not isinstance(v, dict)}
    names_the_option = ("model.kind", "data.kind", "schedule.kind", "optimizer.name")
    return {k: v for k, v in flat.items() if k not in names_the_option}


def repeated(file: Path) -> list[str]:
    """The keys of a file whose values are the schema's defaults, and would be without it, whatever else is chosen."""
    config = configured(stem(file), *OPEN.get(stem(file), (TEXT,))) if file in FILES else configured()
    raw = {section: {"kind": value(config, f"{section}.kind")} for section in KINDS}
    known, own = keys(raw), file.parent.name
    by_options = {key for f in FILES if f.parent.name not in ("experiment", own) for key in said(f)}
    return [
        key
        for key, held in said(file).items()
        if key in known and key not in by_options and held == field_of(key, raw).get_default()
    ]


def field_of(key: str, raw: dict[str, Any]) -> FieldInfo:
    section, _, name = key.rpartition(".")
    return named(schema_of(section, raw))[name]


@pytest.mark.parametrize("file", [*FILES, config_dir() / "train.yaml"], ids=stem)
def test_a_file_holds_only_what_differs_from_the_schema(file: Path) -> None:
    assert repeated(file) == []


def test_a_file_that_repeats_a_default_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "snapshot" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("keep: 3\nevery_seconds: 60\ndir: ${run.dir}/snapshots\n")
    assert repeated(file) == ["snapshot.keep", "snapshot.dir"]


def test_train_yaml_has_a_default_of_each_group() -> None:
    yaml = yaml_of(config_dir() / "train.yaml")
    groups = {key for default in yaml.pop("defaults") if isinstance(default, DictConfig) for key in default}
    assert groups == compose.groups().keys()


def test_every_key_has_a_line_of_help() -> None:
    assert [key for key, text in keys().items() if not text or "\n" in text] == []


def test_the_promised_keys_are_there_with_the_promised_defaults() -> None:
    assert {prefix + name for prefix, names in PROMISED.items() for name in names} <= keys().keys()
    for config in (configured(), configured("~train.threads", "~reduce", "~precision")):  # in the YAML, in the schema
        assert (config.train.threads, config.reduce, config.precision) == (1, "exact", "fp32")
    assert configured("run.dir=s3://b/x").snapshot.dir == "s3://b/x/snapshots"
    assert configured("run.name=one").run.dir == "runs/one"
    for mode in ("exact", "fast"):
        assert configured(f"reduce={mode}").reduce == mode
    for precision in ("fp32", "bf16", "fp16"):
        assert configured(f"precision={precision}").precision == precision


# Radford et al. 2019 and the Hugging Face checkpoints; minGPT's table; Rae et al. 2021, table A1.
@pytest.mark.parametrize(
    ("name", "layers", "heads", "width", "parameters"),
    [
        ("gpt-nano", 3, 3, 48, None),
        ("gpt-micro", 4, 4, 128, None),
        ("gpt-mini", 6, 6, 192, None),
        ("gopher-44m", 8, 16, 512, None),
        ("gpt2", 12, 12, 768, 124_439_808),
        ("gpt2-medium", 24, 16, 1024, 354_823_168),
        ("gpt2-large", 36, 20, 1280, 774_030_080),
        ("gpt2-xl", 48, 25, 1600, 1_557_611_200),
    ],
)
def test_models_have_their_published_sizes(
    name: str, layers: int, heads: int, width: int, parameters: int | None
) -> None:
    model = gpt(configured(f"model={name}"))
    assert (model.n_layer, model.n_head, model.n_embd) == (layers, heads, width)
    if parameters:
        blocks = model.n_layer * (12 * model.n_embd**2 + 13 * model.n_embd)
        assert blocks + (50257 + model.block_size + 2) * model.n_embd == parameters


def test_gpt2_124m_is_gpt2_and_runs_unedited_on_four_nodes_of_four_gpus() -> None:
    config = configured("experiment=gpt2_124m", "data.path=data/fineweb-edu", world_size=16)
    microbatches = config.batch.global_size // config.batch.micro_size
    assert microbatches >= 16
    assert microbatches & (microbatches - 1) == 0  # a power of two: every share is a whole subtree of the sum
    assert config.model == configured("model=gpt2").model
    assert value(config, "data.kind") == "shards"
    assert -(-50257 // value(config, "model.vocab_multiple")) * value(config, "model.vocab_multiple") == 50304
    assert value(config, "data.stride") == config.model.block_size
    assert config.train.max_steps * config.batch.global_size * config.model.block_size == pytest.approx(10e9, rel=0.01)


def test_the_documented_line_that_fine_tunes_on_conversations_starts() -> None:
    docs = (ROOT / "docs" / "workloads.md").read_text()
    commands = docs.replace("\\\n", "").splitlines()
    (line,) = (line for line in commands if line.startswith("mingpt train") and "data=chat" in line)
    config = configured(*line.split()[2:])
    assert (config.data.kind, value(config, "data.tokens"), config.run.name) == ("chat", "bpe", "finetune")
    text = configured("experiment=finetune", "data.path=x")
    assert value(text, "data.stride") == text.model.block_size


def test_shakespeare_char_runs_unedited_in_two_processes() -> None:
    config = configured("experiment=shakespeare_char", world_size=2)
    assert config.data == configured("data=shakespeare").data
    assert config.run.dir == "runs/shakespeare-char"


def test_a_group_option_replaces_the_whole_section() -> None:
    assert configured("model=gpt2").model != configured().model
    assert configured("schedule=linear").schedule.kind == "linear"


def test_keys_of_the_command_line_win_wherever_they_stand() -> None:
    for order in (("model=gpt2", "model.n_layer=1"), ("model.n_layer=1", "model=gpt2")):
        model = gpt(configured(*order))
        assert (model.n_layer, model.n_embd) == (1, 768)
    config = configured("experiment=shakespeare_char", "model=gpt-nano", "batch.global_size=32", "seed=7", "++seed=8")
    assert (gpt(config).n_layer, config.batch.global_size, config.seed) == (3, 32, 8)


def test_an_experiment_changes_keys_and_groups() -> None:
    config = configured("experiment=gpt2_124m", TEXT)
    assert (config.precision, gpt(config).n_layer, value(config, "data.kind")) == ("bf16", 12, "shards")


def test_a_group_that_has_a_default_takes_no_plus() -> None:
    assert problems("+experiment=gpt2_124m") == [
        "+experiment=gpt2_124m: experiment has a default already: write experiment=gpt2_124m without the +"
    ]


@pytest.mark.parametrize("new", ["+batch.new=1", "++batch.new=1"])
def test_a_new_key_is_refused(new: str) -> None:
    assert problems(new) == ["batch.new is not a key"]


@pytest.mark.parametrize("key", keys({}))
def test_a_deleted_key_takes_the_schemas_default(key: str) -> None:
    expected = default(field_of(key, {}), {})
    if expected == MISSING:
        assert problems(f"~{key}") == [f"{key}: Missing mandatory value: {key}"]
    else:
        assert value(configured(f"~{key}"), key) == expected


@pytest.mark.parametrize(
    ("arguments", "key", "expected"),
    [
        (("experiment=mnist", "~train.max_steps"), "train.max_steps", 1000),
        (("experiment=mnist", "~train.max_steps"), "schedule.decay_steps", 1000),
        (("snapshot=often", "~snapshot.every_seconds"), "snapshot.every_seconds", 600),
        (("~data.tokenizer",), "data.tokenizer", None),
        (("~batch", "batch.micro_size=8"), "batch.micro_size", 8),
        (("run.dir=/x", "~snapshot"), "snapshot.dir", "/x/snapshots"),
        (("~seed", "seed=7"), "seed", 7),
        (("~train.max_steps", "++train.max_steps=7"), "schedule.decay_steps", 7),
    ],
)
def test_a_deleted_key_is_as_if_nobody_had_said_it(arguments: tuple[str, ...], key: str, expected: object) -> None:
    assert value(configured(*arguments), key) == expected


def test_a_deletion_that_names_another_value_is_a_mistake() -> None:
    assert configured("~seed=1").seed == 1
    assert problems("~seed=7") == ["~seed=7: Could not delete from config. The value of 'seed' is 1."]


@pytest.mark.parametrize(("section", "kind"), [(section, kind) for section in KINDS for kind in KINDS[section]])
def test_each_kind_has_an_option_of_its_name_with_the_schemas_defaults(section: str, kind: str) -> None:
    fields = named(KINDS[section][kind])
    required = {name for name, field in fields.items() if field.get_default() == MISSING or name in ("path", "mix")}
    values = {"mix": "{web: {path: x}}"}
    given = [OWN[section]] if kind == "own" else [f"{section}.{name}={values.get(name, 'x')}" for name in required]
    config = (
        configured(f"{section}={kind}", "model.block_size=64", *given)
        if section == "data"
        else configured(f"{section}={kind}", *given)
    )
    held = value(config, section).model_dump()
    expected = {name: field.get_default() for name, field in fields.items()}
    assert {k: v for k, v in held.items() if k not in (*required, "_target_")} == {
        k: v for k, v in expected.items() if k not in (*required, "_target_")
    }


@pytest.mark.parametrize("order", [("data.kind=shards", "data.path=x"), ("data.path=x", "data.kind=shards")])
def test_a_kind_brings_its_keys(order: tuple[str, ...]) -> None:
    assert configured(*order).data == configured("data=shards", "data.path=x").data
    assert configured("experiment=shakespeare_char", *order).data == configured(*order).data


def test_naming_the_kind_that_is_there_changes_nothing() -> None:
    assert configured("data.kind=text") == configured()


def test_a_deletion_undoes_what_stands_before_it() -> None:
    assert configured("seed=7", "~seed").seed == 1
    assert gpt(configured("model=gpt2", "~model.n_layer")).n_layer == 4


def test_an_interpolation_follows_the_command_line() -> None:
    config = configured("train.max_steps=77", "batch.global_size=32", "seed=${train.threads}")
    assert (config.schedule.decay_steps, config.optimizer.reference_batch, config.seed) == (77, 32, 1)


def test_the_microbatches_grow_with_the_processes_if_the_user_says_so() -> None:
    config = configured("batch.per_process_size=32", world_size=8)
    assert config.global_size(8) == 256
    assert configured(world_size=4).global_size(4) == 64


def test_validate_fills_what_is_missing_and_refuses_what_is_unknown() -> None:
    assert validate({}).train.max_steps == 1000
    with pytest.raises(UserError, match=r"^trains is not a key \(did you mean train\?\)$"):
        validate({"trains": {}})


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/key", "s3://bucket/key"),
        ("s3://user:password@bucket/key", "s3://***@bucket/key"),
        ("https://user:password@host:8/x?sig=abc", "https://***@host:8/x?***"),
        ("https://host/x?sig=abc&y=1", "https://host/x?***"),
        ("https://user@host/x", "https://***@host/x"),
        ("https://user:p@ss@host/x", "https://***@host/x"),
        ("memory://runs/x", "memory://runs/x"),
        ("gs://bucket/user@example.com/x", "gs://bucket/user@example.com/x"),
        ("simplecache::s3://user:password@bucket/key", "simplecache::s3://***@bucket/key"),
        ("/data/a@b:c?d.txt", "/data/a@b:c?d.txt"),
        ("runs/run", "runs/run"),
    ],
)
def test_a_shown_url_has_no_secrets(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
    assert without_secrets({"a": {"b": url, "c": 1, "d": None}}) == {"a": {"b": shown, "c": 1, "d": None}}


def test_what_only_looks_like_a_url_is_no_crash() -> None:
    assert without_secrets("http://[x/y") == "http://[x/y"


def test_the_printed_config_is_yaml_without_secrets() -> None:
    config = configured("data.path='https://me:secret@host/x?sig=secret'", "optimizer.lr=1e-3")
    assert value(config, "data.path") == "https://me:secret@host/x?sig=secret"
    text = compose.as_yaml(config)
    assert "secret" not in text
    shown = OmegaConf.to_container(OmegaConf.create(text))
    assert shown == config.model_dump() | {"data": config.data.model_dump() | {"path": "https://***@host/x?***"}}


def test_no_two_experiments_have_one_name() -> None:
    """A run is found by its name: the second would go on where the first ended."""
    files = sorted((config_dir() / "experiment").glob("*.yaml"))
    names = [configured(stem(f), *OPEN.get(stem(f), (TEXT,))).run.name for f in files]
    assert sorted(set(names)) == sorted(names)
    assert configured().run.name not in names


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("experiment=gpt2_124m data=random ~data.stride", "kind", "random"),
        (
            "experiment=gpt2_124m data.path=x model=gpt-micro ~data.stride",
            "stride",
            1,
        ),  # follows a key that only the schema has
        ("data.stride=${oc.env:NOPE} ~data.stride", "stride", 1),
    ],
)
def test_a_key_of_a_file_is_deleted_whatever_it_holds(arguments: str, key: str, value: object) -> None:
    assert configured(*arguments.split()).data.model_dump()[key] == value


def test_a_key_without_a_value_may_be_added() -> None:
    config = configured("experiment=classifier", "~model._target_", "+model._target_=examples.classifier.Classifier")
    assert config.model.model_dump()["_target_"] == "examples.classifier.Classifier"


@pytest.mark.parametrize("argument", ["~data.path", "~data", "data=text"])
def test_a_text_is_never_chosen_by_the_schema(argument: str) -> None:
    """Else a program that works on a snapshot would read another text than the snapshot's."""
    with pytest.raises(UserError, match=r"data\.path: Missing mandatory value"):
        configured(argument)


@pytest.mark.parametrize("argument", ["~data.path", "~data", "data.kind=text"])
def test_a_snapshots_text_is_never_another(argument: str) -> None:
    stored = {"model": {"kind": "gpt"}, "data": {"kind": "text", "path": "book.txt"}}
    with pytest.raises(UserError, match=r"data\.path: Missing mandatory value"):
        evaluation_config(stored, "run", [argument], 1)


def test_a_strangers_key_forges_no_line() -> None:
    stored = {"model": {"kind": "gpt"}, "data": {"kind": "text", "path": "book.txt", "x\nerror: all well": "/etc"}}
    with pytest.raises(UserError) as mistake:
        evaluation_config(stored, "run", [], 1)
    assert [problem for problem in mistake.value.problems if "\n" in problem] == []
