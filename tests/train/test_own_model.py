"""model._target_ and data._target_: any module on any rows; what is wrong with them is told before a run begins."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.classifier import rows
from mingpt.config.models import OwnModel
from mingpt.data.opening import open_data
from mingpt.data.own import source_of
from mingpt.errors import CRASHED, UserError
from mingpt.model.gpt2 import GPT
from mingpt.train.attempt import attempt
from mingpt.train.factory import build
from mingpt.train.own_model import try_out
from mingpt.world.lifetime import Lifetime
from tests.kits.config_kit import configured, problems
from tests.kits.own_kit import CLASSIFIER, FAULTS, ODD
from tests.kits.paths_kit import KITS
from tests.kits.told import Told


def without_lines(text: str) -> str:
    return re.sub(r"line \d+", "line …", text)


def test_the_target_brings_its_section_and_its_arguments_need_no_plus() -> None:
    config = configured(*CLASSIFIER, "model.hidden=7", "++model.dropout=0.5", "data.seed=3", "data.workers=1")
    assert config.model.model_dump() == {
        "kind": "own", "_target_": "examples.classifier.Classifier", "block_size": 1, "hidden": 7, "dropout": 0.5,
    }  # fmt: skip
    assert (config.data.workers, config.data.model_dump()["seed"]) == (1, 3)
    # An experiment's keys can be changed, too.
    changed = configured("experiment=classifier", "model.hidden=9", "data.count=99")
    assert changed.model.model_dump()["hidden"] == 9
    assert len(open_data(changed.data, 1, 8).train) == 89


def test_arguments_of_known_names_are_supplied() -> None:
    model = build(configured("model._target_=tests.kits.own_kit.derived", "model.block_size=4"), vocab_size=5)
    assert isinstance(model, GPT)
    assert (model.config.vocab_size, model.config.block_size) == (5, 4)


@pytest.mark.parametrize(
    "arguments",
    [
        "model._target_=nothing",
        "model._target_='os.path;x.y'",
        "model._target_=no_such.module.Model",
        "model._target_=tests.kits.own_kit.Liner",
        "model._target_=tests.kits.own_kit.NoForward",
        "model._target_=tests.kits.own_kit.fails",
        "model._target_=examples.classifier.Classifier model.hiden=7 seed=-1",
        "model.hidden=7",
        "model=own",
    ],
)
def test_a_wrong_path_is_a_mistake_before_anything_starts(arguments: str, told: Told) -> None:
    told(problems(*arguments.split()))


@pytest.mark.parametrize("content", ["y = (", "import no_such_package", "raise SystemExit(3)"])
def test_a_module_that_cannot_be_imported_is_told_with_its_line(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "unlucky.py").write_text(f"x = 1\n{content}")
    [problem] = problems("model._target_=unlucky.Model")
    assert problem.startswith("model._target_=unlucky.Model: ")
    assert problem.endswith(f" ({tmp_path}/unlucky.py, line 2)")


def tried(target: str, *arguments: str) -> nn.Module:
    config = configured(*f"model._target_=tests.kits.own_kit.{target}".split(), *arguments)
    assert isinstance(config.model, OwnModel)
    model = build(config, 0)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    try_out(model, config.model, rows(2).train[[0, 1]])
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    return model


MADE = ["gives_none", "fails model.hidden=3", "Identity", *(f"odd model.what={what}" for what in ODD)]
TRIED = ["Idle", "Sparse", "Normed", *(f"Faulty model.fault={fault}" for fault in FAULTS)]


@pytest.mark.parametrize("target", [*MADE, *TRIED])
def test_what_gives_no_module_and_what_does_not_keep_the_protocol_is_a_mistake(target: str, told: Told) -> None:
    with pytest.raises(UserError) as mistake:
        tried(target)
    told(without_lines(str(mistake.value)), KITS)


def test_what_keeps_it_is_left_as_it_was() -> None:
    assert [p.grad for p in tried("Idle", "train.freeze=[unused.*]").parameters()] == [None] * 4


@pytest.mark.parametrize("target", ["gives_none", "no_rows", "uneven"])
def test_what_gives_no_source_is_a_mistake(target: str, told: Told) -> None:
    with pytest.raises(UserError) as mistake:
        open_data(configured(f"data._target_=tests.kits.own_kit.{target}").data, 1, 2)
    told(without_lines(str(mistake.value)), KITS)


def test_a_gpt_needs_tokens() -> None:
    with pytest.raises(UserError, match="the data has no tokens"):
        build(configured(CLASSIFIER[1]), 0)


def test_the_identity_of_rows_is_that_of_their_content() -> None:
    x, y = torch.arange(12.0).view(6, 2), torch.arange(6)
    first, same, other = (source_of((z, y), (z[:3], y[:3]), size) for z, size in ((x, 2), (x + 0, 4), (x + 1, 2)))
    assert first.sha256 == same.sha256 != other.sha256


def test_code_that_ends_the_process_has_not_finished_the_run(
    tmp_path: Path, outlived: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code = ("model._target_=tests.kits.own_kit.QuitsLater", CLASSIFIER[1], "batch.micro_size=16")
    assert attempt([*code, f"run.dir={tmp_path}/run"], Lifetime()) == CRASHED
    assert "raise SystemExit(0)" in capsys.readouterr().err
