"""A resume takes over no tensor that is not what this model and this optimizer would have written."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from examples.classifier import rows
from mingpt.config import compose
from mingpt.config.schema import Config
from mingpt.errors import UserError
from mingpt.snapshot.format import DTYPES, Manifest, TensorInfo
from mingpt.snapshot.reader import Loaded
from mingpt.train.factory import build
from mingpt.train.resume import check_fits
from snapshot_kit import PROVENANCE
from told import Told
from update_kit import one_step, state_of, update_of

TARGETS = ("model._target_=own_kit.Linear", "data._target_=examples.classifier.rows")


def configured(*overrides: str) -> Config:
    config = compose.configure([*TARGETS, *overrides])
    assert config is not None
    return config


def stored(config: Config) -> Loaded:
    """What a snapshot of the model's first step holds."""
    model = build(config, 0)
    update = update_of(model, config.optimizer, config.schedule, global_size=4, fp16=config.precision == "fp16")
    one_step(update, lambda: model(*rows(4).train[[0, 1, 2, 3]]), 0)
    manifest = Manifest(
        format=3,
        step=1,
        digest="0" * 64,
        parts={},
        tensors={},
        **PROVENANCE | {"config": config.model_dump(), "vocabulary": {"kind": "none"}},
    )
    remembered = state_of(update)
    return Loaded(manifest, {"model": model.state_dict(), "optimizer": remembered}, "there")


def check(loaded: Loaded, config: Config) -> None:
    infos = {
        name: TensorInfo(dtype=DTYPES[t.dtype], shape=list(t.shape), sha256="0" * 64, part=f"{kind}-00001")
        for kind, tensors in loaded.state.items()
        for name, t in tensors.items()
    }
    manifest = loaded.manifest.model_copy(update={"tensors": infos})
    check_fits(manifest, config, rows(4).vocabulary.to_json(), build(config, 0))


def test_what_was_written_is_taken_over() -> None:
    kinds = (), ("precision=fp16",), ("train.freeze=['*.bias']",)
    for then in kinds:
        loaded = stored(configured(*then))
        for now in kinds:
            check(loaded, configured(*now))


@pytest.mark.parametrize(
    "wrong",
    [
        {"layer.weight.exp_avg": torch.zeros(16)},
        {"layer.bias.exp_avg_sq": torch.zeros(0)},
        {"layer.bias.exp_avg": torch.zeros(2).half()},
        {"layer.bias.step": torch.tensor(1)},
        {"layer.weight.evil": torch.zeros(2, 10)},
        {"no.such.exp_avg": torch.zeros(2, 10)},
        {"loss_scale": torch.tensor([1.0])},
        {"loss_scale.finite_steps": None},
        {"layer.bias.step": None, "x": torch.zeros(())},
    ],
    ids=" ".join,
)
def test_an_optimizer_tensor_that_does_not_fit_is_refused_before_it_is_used(
    wrong: dict[str, Tensor | None], told: Told
) -> None:
    config = configured("precision=fp16")
    loaded = stored(config)
    state = {name: tensor for name, tensor in (loaded.state["optimizer"] | wrong).items() if tensor is not None}
    with pytest.raises(UserError) as mistake:
        check(replace(loaded, state={**loaded.state, "optimizer": state}), config)
    told(str(mistake.value))


def test_weights_of_another_dtype_are_refused() -> None:
    config = configured()
    loaded = stored(config)
    model = {name: tensor.half() for name, tensor in loaded.state["model"].items()}
    with pytest.raises(UserError, match=r"layer.bias is float16"):
        check(replace(loaded, state={**loaded.state, "model": model}), config)


def test_the_config_of_a_manifest_may_be_anything() -> None:
    loaded = stored(configured())
    for config in ({}, {"train": 3}, {"train": {"freeze": 3}}, {"train": {"freeze": [3]}}):
        manifest = loaded.manifest.model_copy(update={"config": config})
        check(replace(loaded, manifest=manifest), configured())
