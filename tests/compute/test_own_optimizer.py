"""optimizer._target_: what an optimizer of one's own computes, what of it is refused and why, what a resume does."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from mingpt.config.schema import OwnOptimizerSection, Schedule
from mingpt.errors import FINISHED, USER_ERROR, UserError
from mingpt.replay.replaying import replay
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from tests.kits.config_kit import problems
from tests.kits.paths_kit import ROOT
from tests.kits.replay_kit import settings_of
from tests.kits.told import Told
from tests.kits.update_kit import one_step, state_of, update_of

LION, ADAFACTOR = (f"optimizer._target_=examples.own_optimizer.{name}" for name in ("Lion", "Adafactor"))


def made(target: str, **more: object) -> OwnOptimizerSection:
    return OwnOptimizerSection.model_validate({"_target_": target, "lr": 0.1, "clip_norm": 0.0, **more})


def test_lion_is_the_papers_with_the_sections_learning_rates_and_decay() -> None:
    torch.manual_seed(1)
    layer, config = nn.Linear(5, 3), made("examples.own_optimizer.Lion", weight_decay=0.5, vector_ratio=0.25)
    update = update_of(layer, config, Schedule(kind="constant", warmup_steps=0))
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    x = torch.randn(4, 5)
    one_step(update, lambda: (layer(x).sum(), torch.tensor(4.0)), 0)
    gradient = {"weight": x.sum(0).expand(3, 5) / 4, "bias": torch.ones(3)}
    for name, lr, decay in (("weight", 0.1, 0.5), ("bias", 0.025, 0.0)):
        wanted = before[name] * (1 - lr * decay) - lr * gradient[name].sign()
        torch.testing.assert_close(layer.get_parameter(name).detach(), wanted, msg=name)
        torch.testing.assert_close(state_of(update)[f"{name}.own.mean"], gradient[name] * 0.01)


@pytest.mark.parametrize("name", ["ByNorm", "Random", "Remembers", "Summed", "Listed", "OldForm", "Forgets"])
def test_what_can_be_exact_in_no_world_is_refused_with_the_reason(name: str, told: Told) -> None:
    with pytest.raises(UserError) as mistake:
        update_of(nn.Linear(5, 3), made(f"tests.kits.own_kit.{name}"), Schedule())
    told(re.sub(r"line \d+", "line …", str(mistake.value)), ROOT)


@pytest.mark.parametrize(
    "given",
    ["tests.kits.own_kit.Torchs", "tests.kits.own_kit.Sgd optimizer.beta=3", "tests.kits.own_kit.Sgd optimizer=muon"],
)
def test_what_is_no_optimizer_is_a_mistake_before_anything_starts(given: str, told: Told) -> None:
    told(problems(*f"optimizer._target_={given}".split()))


def trained(folder: Path, *overrides: str) -> int:
    return attempt(settings_of(f"{folder}/run", *overrides), Lifetime())


def test_a_run_goes_on_with_another_optimizer_only_if_told_and_that_begins_anew(
    tmp_path: Path, text: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places, store = (f"data.path={text}", f"data.cache_dir={cache}"), Store(f"{tmp_path}/run/snapshots")

    def names(step: int) -> set[str]:
        return {name.rpartition("weight.")[2] for name in read(store, step).state["optimizer"] if "weight." in name}

    assert trained(tmp_path, *places, "train.max_steps=4") == FINISHED
    for steps, own, kept in ((8, LION, {"own.mean"}), (12, ADAFACTOR, {"own.rows", "own.columns", "own.squares"})):
        assert trained(tmp_path, *places, f"train.max_steps={steps}", own) == USER_ERROR
        assert "optimizer._target_: " in capsys.readouterr().err
        assert trained(tmp_path, *places, f"train.max_steps={steps}", own, "resume.changed=true") == FINISHED
        assert "what the other optimizer remembers of a parameter is not known" in capsys.readouterr().out
        assert names(steps) == kept
    with replay(f"{tmp_path}/run", 11, (*places, ADAFACTOR)) as past:
        assert [past.advance().same for _ in range(3)] == [True] * 3
    for steps, name in ((16, "muon"), (20, "adamw")):
        settings = f"optimizer.name={name}", f"train.max_steps={steps}", "resume.changed=true"
        assert trained(tmp_path, *places, *settings) == FINISHED
        assert names(steps) == {"step", "exp_avg", "exp_avg_sq"} | ({"momentum_buffer"} if name == "muon" else set())
