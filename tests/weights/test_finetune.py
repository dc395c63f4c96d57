"""Fine-tuning: a run that starts from GPT-2's weights, part of them frozen, is as exact as any other."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mingpt.compute.rules import trainable
from mingpt.errors import UserError
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from mingpt.train.preparing import freeze
from tests.kits.replay_kit import train_here
from tests.kits.weights_kit import ours, saved

FREEZE = "train.freeze=[transformer.wte.*,'transformer.h.[0].*']"


def frozen(name: str) -> bool:
    return name.startswith(("transformer.wte.weight", "transformer.h.0."))


def test_patterns_freeze_what_they_match_and_an_unknown_one_is_a_mistake() -> None:
    model = ours()
    freeze(model, ["transformer.h.?.ln_*", "transformer.wpe.weight"])
    names = [name for name, _ in model.named_parameters()]
    left = [name for name, _ in trainable(model)]
    assert left == [n for n in names if ".ln_1" not in n and ".ln_2" not in n and "wpe" not in n]
    with pytest.raises(UserError) as mistake:
        freeze(ours(), ["lm_head.*", "transformer.wte.weight", "wte"])
    assert [p.split()[1] for p in mistake.value.problems] == ["'lm_head.*'", "'wte'"]
    with pytest.raises(UserError, match=r"^train\.freeze matches every"):
        freeze(ours(), ["*"])


def test_frozen_weights_are_those_of_the_file_have_no_state_and_a_resume_reads_no_file(
    tmp_path: Path, text: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "gpt2", vocab_size=len(set(text.read_text())), n_head=3)  # of run_kit's sizes
    run, store = f"{tmp_path}/run", Store(f"{tmp_path}/run/snapshots")
    how = (f"data.path={text}", f"data.cache_dir={cache}", FREEZE, "train.max_steps=6")
    train_here(run, *how, f"model.init_from={tmp_path}/gpt2")
    loaded, first = read(store, 6), load_file(tmp_path / "gpt2/model.safetensors")
    for name, tensor in loaded.state["model"].items():
        assert torch.equal(tensor, first[name]) == frozen(name), name
    with_state = {name.rpartition(".")[0] for name in loaded.state["optimizer"]} - {""}
    assert with_state == {name for name in first if not frozen(name)}
    store.delete(6)
    capsys.readouterr()
    train_here(run, *how, f"model.init_from={tmp_path}/gone")
    out = capsys.readouterr().out
    assert f"-> {tmp_path}/gone: not read" in out
    assert "resumed from step 4" in out
    assert "equality" not in out
    again = read(store, 6).manifest
    assert (again.digest, again.fingerprint) == (loaded.manifest.digest, loaded.manifest.fingerprint)
