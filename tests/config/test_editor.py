"""`mingpt train --json-schema`, and configs/schema.json, which editors take from a config's comment."""

import json
import re

import yaml
from jsonschema import Draft7Validator

from mingpt.config.editor import schema
from tests.kits.paths_kit import ROOT
from tests.kits.verb_kit import mingpt

SCHEMA = ROOT / "configs/schema.json"
WHOLE = [ROOT / "configs/train.yaml", *sorted((ROOT / "configs/experiment").glob("*.yaml"))]


def test_the_committed_schema_is_what_the_option_prints_which_trains_nothing() -> None:
    """Else: mingpt train --json-schema >configs/schema.json"""
    assert mingpt("train --json-schema experiment=synthetic") == SCHEMA.read_text()
    Draft7Validator.check_schema(json.loads(SCHEMA.read_text()))


def test_every_whole_config_names_the_schema_and_fits_it() -> None:
    for config in WHOLE:
        (line,) = re.findall(r"^# yaml-language-server: \$schema=(.*)", config.read_text(), re.M)
        assert (config.parent / line).resolve() == SCHEMA
        Draft7Validator(schema()).validate(yaml.safe_load(config.read_text()))


def test_a_wrong_key_or_value_does_not_fit() -> None:
    for config, fits in (
        ({"batch": {"micro_size": "${oc.env:N}"}}, True),
        ({"data": {"kind": "mix", "mix": {"web": {"kind": "shards", "path": "s3://b/x", "weight": 0.7}}}}, True),
        ({"model": {"_target_": "mine.Net", "width": 8}, "defaults": [{"override /data": "random"}]}, True),
        ({"train": {"max_step": 5}}, False),
        ({"batch": {"micro_size": "auto"}}, False),
    ):
        assert Draft7Validator(schema()).is_valid(config) == fits
