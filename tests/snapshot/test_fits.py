"""A resume takes over no tensor that is not what this model and this optimizer would have written."""

from collections.abc import Callable
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
from update_kit import one_step, state_of, update_of

TARGETS = ("model._target_=own_kit.Linear", "data._target_=examples.classifier.rows")
Change = Callable[[dict[str, Tensor]], object]


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


@pytest.mark.parametrize("now", [(), ("precision=fp16",), ("train.freeze=['*.bias']",)], ids=str)
@pytest.mark.parametrize("then", [(), ("precision=fp16",), ("train.freeze=['*.bias']",)], ids=str)
def test_what_was_written_is_taken_over(then: tuple[str, ...], now: tuple[str, ...]) -> None:
    check(stored(configured(*then)), configured(*now))


def put(name: str, tensor: Tensor) -> Change:
    return lambda state: state.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("layer.weight.exp_avg", torch.zeros(16)), "layer.weight.exp_avg is float32 [16] in place of float32 [2,"),
        (put("layer.bias.exp_avg_sq", torch.zeros(0)), "layer.bias.exp_avg_sq is float32 [0] in place of float32 [2]"),
        (put("layer.bias.exp_avg", torch.zeros(2).half()), "layer.bias.exp_avg is float16 [2] in place of float32 [2]"),
        (put("layer.bias.step", torch.tensor(1)), "layer.bias.step is int64 [] in place of float32 []"),
        (put("layer.weight.evil", torch.zeros(2, 10)), "layer.weight.evil is unknown"),
        (put("no.such.exp_avg", torch.zeros(2, 10)), "no.such.exp_avg is unknown"),
        (put("loss_scale", torch.tensor([1.0])), "loss_scale is float32 [1] in place of float32 []"),
        (lambda state: state.pop("loss_scale.finite_steps"), "loss_scale.finite_steps is missing"),
        (lambda state: state.pop("layer.bias.exp_avg"), "layer.bias.exp_avg is missing"),
        (
            lambda state: [state.pop("layer.bias.step"), state.update(x=torch.zeros(()))],
            "layer.bias.step is missing, x is unknown",
        ),
    ],
)  # fmt: skip
def test_an_optimizer_tensor_that_does_not_fit_is_refused_before_it_is_used(change: Change, message: str) -> None:
    config = configured("precision=fp16")
    loaded = stored(config)
    change(loaded.state["optimizer"])
    with pytest.raises(UserError) as mistake:
        check(loaded, config)
    assert f"does not have this optimizer's state: {message}" in str(mistake.value)


def test_weights_of_another_dtype_are_refused() -> None:
    config = configured()
    loaded = stored(config)
    model = {name: tensor.half() for name, tensor in loaded.state["model"].items()}
    with pytest.raises(
        UserError, match=r"is one of another model \(layer.bias is float16 \[2\] in place of float32 \[2\]"
    ):
        check(replace(loaded, state={"model": model, "optimizer": loaded.state["optimizer"]}), config)


def test_the_config_of_a_manifest_may_be_anything() -> None:
    loaded = stored(configured())
    for config in ({}, {"train": 3}, {"train": {"freeze": 3}}, {"train": {"freeze": [3]}}):
        manifest = loaded.manifest.model_copy(update={"config": config})
        check(replace(loaded, manifest=manifest), configured())
