"""Fine-tuning: a run that starts from GPT-2's weights, part of them frozen, is as exact as any other."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mingpt.config import compose
from mingpt.errors import UserError
from mingpt.model.kinds.gpt import GPTModel
from mingpt.snapshot.reader import Loaded, read
from mingpt.train.factory import build, freeze, trainable
from run_kit import Run
from weights_kit import ours, saved, shape

NewRun = Callable[..., Run]
FROZEN = ("transformer.wte.weight", "transformer.h.0.")
FREEZE = "train.freeze=[transformer.wte.*,'transformer.h.[0].*']"


def newest(run: Run) -> Loaded:
    return read(run.store, run.store.steps()[0])


def frozen(name: str) -> bool:
    return name.startswith(FROZEN)


def test_the_experiment_is_ready_but_for_weights_and_text() -> None:
    config = compose.configure(["experiment=finetune", "model.init_from=s3://b/gpt2", "data.path=text"])
    assert config is not None
    assert isinstance(config.model, GPTModel)
    assert (config.model.n_layer, config.model.init_from, config.optimizer.lr) == (12, "s3://b/gpt2", 5e-5)
    assert config.data.model_dump()["tokens"] == "bpe"
    with pytest.raises(UserError, match=r"  1\. data\.path: Missing mandatory value"):
        compose.configure(["experiment=finetune"])


def test_patterns_freeze_what_they_match_and_an_unknown_one_is_a_mistake() -> None:
    model = ours(shape())
    freeze(model, ["transformer.h.?.ln_*", "transformer.wpe.weight"])
    names = [name for name, _ in model.named_parameters()]
    left = [name for name, _ in trainable(model)]
    assert left == [n for n in names if ".ln_1" not in n and ".ln_2" not in n and "wpe" not in n]
    with pytest.raises(UserError) as mistake:
        freeze(ours(shape()), ["lm_head.*", "transformer.wte.weight", "wte"])
    assert [p.partition(";")[0] for p in mistake.value.problems] == [
        "train.freeze: 'lm_head.*' matches no parameter",
        "train.freeze: 'wte' matches no parameter",
    ]
    assert "there are transformer.wte.weight, transformer.wpe.weight, transformer.h.0.ln_1" in mistake.value.problems[0]
    with pytest.raises(UserError, match=r"train\.freeze matches every parameter: nothing is left to train"):
        freeze(ours(shape()), ["*"])


def test_the_model_is_built_frozen() -> None:
    config = compose.configure(["train.freeze=['*.bias']"])
    assert config is not None
    assert all(not name.endswith(".bias") for name, _ in trainable(build(config, 5)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """Weights for the characters of the text, of run_kit's sizes."""
    folder = tmp_path_factory.mktemp("gpt2")
    saved(folder, vocab_size=len(set(text.read_text())), n_head=3)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, text: Path, cache: Path, folder: Path) -> Run:
    run = Run(str(tmp_path_factory.mktemp("alone")), text, cache, (f"model.init_from={folder}", FREEZE))
    assert "started from the weights of" in run.finish(1)
    return run


@pytest.mark.slow
def test_frozen_weights_are_those_of_the_file_and_have_no_state(alone: Run, folder: Path) -> None:
    loaded = newest(alone)
    first = load_file(folder / "model.safetensors")
    for name, tensor in loaded.state["model"].items():
        assert torch.equal(tensor, first[name]) == frozen(name), name
    with_state = {name.rpartition(".")[0] for name in loaded.state["optimizer"]} - {""}
    assert with_state == {name for name in first if not frozen(name)}
    assert len(loaded.manifest.fingerprint["init_from"]) == 64


@pytest.mark.slow
def test_three_processes_one_of_them_killed_give_the_same_bits(alone: Run, new_run: NewRun) -> None:
    run = new_run(*alone.overrides)
    started = run.start(3, restarts=3)
    killed: list[int] = []

    def kill(step: int) -> None:
        if step >= 9 and not killed:
            killed.append(started.workers()[2])
            os.kill(killed[0], signal.SIGKILL)

    started.on_step = kill
    assert started.wait() == 0, started.output
    assert "resumed from step 8" in started.output
    assert run.digest() == alone.digest()


@pytest.mark.slow
def test_a_resume_does_not_read_the_weights(alone: Run, new_run: NewRun, folder: Path, tmp_path: Path) -> None:
    run = new_run(FREEZE)
    shutil.copytree(alone.dir, run.dir)
    for step in run.store.steps()[:-2]:
        run.store.delete(step)
    output = run.finish(2, f"model.init_from={tmp_path}/gone")
    assert "resumed from step 8" in output
    assert f"model.init_from: {folder} -> {tmp_path}/gone: not read, since the weights are those of step 8" in output
    assert "equality with an undisturbed run ends" not in output
    assert run.digest() == alone.digest()
    assert newest(run).manifest.fingerprint == newest(alone).manifest.fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_weights_that_do_not_fit_end_all_processes_with_64(new_run: NewRun, folder: Path, world: int) -> None:
    run = new_run(f"model.init_from={folder}", "model.n_layer=3", "model.n_embd=48")
    started = run.start(world)
    assert started.wait() == (64 if world == 1 else 1), started.output
    assert "the weights have n_layer 2, the model has n_layer 3: set model.n_layer=2" in (started.output)
    assert world > 1 or "Traceback" not in started.output  # torchrun has one of its own
    assert len(re.findall(r"error: .*2 problems:", started.output)) == 1
