"""A resume takes over no tensor that is not what this model and this optimizer would have written."""

from functools import cache

import pytest
import torch
from torch import Tensor

from examples.classifier import rows
from mingpt.compose import compose
from mingpt.config.schema import Config
from mingpt.snapshot.format import DTYPES, Manifest, TensorInfo
from mingpt.snapshot.reader import Loaded
from mingpt.train.factory import build
from mingpt.train.resume import check_fits
from tests.kits.snapshot_kit import PROVENANCE
from tests.kits.told import Told
from tests.kits.update_kit import one_step, state_of, update_of


@cache
def configured(*overrides: str) -> Config:
    targets = ("model._target_=tests.kits.own_kit.Linear", "data._target_=examples.classifier.rows")
    return compose.configure([*targets, *overrides])


def stored(*overrides: str) -> Loaded:
    """What a snapshot of the model's first step holds."""
    config = configured(*overrides)
    model = build(config, 0)
    update = update_of(model, config.optimizer, config.schedule, global_size=4, fp16=config.precision == "fp16")
    one_step(update, lambda: model(*rows(4).train[[0, 1, 2, 3]]), 0)
    settings = PROVENANCE | {"config": config.model_dump(), "vocabulary": {"kind": "none"}}
    manifest = Manifest(format=3, step=1, digest="0" * 64, parts={}, tensors={}, **settings)
    return Loaded(manifest, {"model": model.state_dict(), "optimizer": state_of(update)}, "there")


def check(loaded: Loaded, *overrides: str, **changes: object) -> None:
    infos = {
        name: TensorInfo(dtype=DTYPES[t.dtype], shape=list(t.shape), sha256="0" * 64, part=f"{kind}-00001")
        for kind, tensors in loaded.state.items()
        for name, t in tensors.items()
    }
    manifest, config = loaded.manifest.model_copy(update={"tensors": infos, **changes}), configured(*overrides)
    check_fits(manifest, config, rows(4).vocabulary.to_json(), build(config, 0))


def test_what_was_written_is_taken_over() -> None:
    kinds = (), ("precision=fp16",), ("train.freeze=['*.bias']",), ("optimizer.ema=0.9",)
    for then in kinds:
        loaded = stored(*then)
        for now in kinds:
            check(loaded, *now)
    loaded = stored()
    for config in ({}, {"train": 3}, {"train": {"freeze": 3}}, {"train": {"freeze": [3]}}):  # it may be anything
        check(loaded, config=config)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layer.weight.exp_avg": torch.zeros(16)},
        {"layer.bias.exp_avg": torch.zeros(2).half()},
        {"layer.weight.evil": torch.zeros(2, 10)},
        {"loss_scale.finite_steps": None},
        {"layer.bias": torch.zeros(2).half()},
    ],
    ids=" ".join,
)
def test_a_tensor_that_does_not_fit_is_refused_before_it_is_used(wrong: dict[str, Tensor | None], told: Told) -> None:
    loaded = stored("precision=fp16", "optimizer.ema=0.9")
    for name, tensor in wrong.items():
        tensors = loaded.state["model" if name in loaded.state["model"] else "optimizer"]
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    with told.mistake():
        check(loaded, "precision=fp16")
