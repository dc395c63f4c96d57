"""lm-eval measures what `mingpt export` writes, by the command of docs/workloads-evaluate-generate.md."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mingpt.commands.loading import load
from mingpt.data.source import TextVocabulary
from tests.kits import bpe_kit
from tests.kits.branch_kit import train
from tests.kits.paths_kit import ROOT
from tests.kits.run_kit import TIME_LIMIT
from tests.kits.tasks_kit import write_tasks
from tests.kits.verb_kit import mingpt, store

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
PAGE = (ROOT / "docs/workloads-evaluate-generate.md").read_text()
EXPORT, MEASURE = re.findall(r"^(mingpt export .*)\n(lm_eval --model hf .*)$", PAGE, re.M)[0]
CHARACTERS = "pretrained=exported,prefix_token_id=0"  # they have no end of text


@pytest.mark.parametrize("tokens", ["bpe", "char"])
def test_an_exported_run_answers_tasks_with_our_probabilities(
    tokens: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = "pretrained=exported" if tokens == "bpe" else CHARACTERS
    assert f"--model_args {arguments}" in PAGE
    own = ("data.tokens=bpe", f"data.tokenizer={bpe_kit.write_gpt2(Path('gpt2'))}") if tokens == "bpe" else ()
    train(Path("runs/gpt2"), text, Path("cache"), "model.block_size=64", *own)
    mingpt(EXPORT.removeprefix("mingpt "))
    write_tasks(Path("tasks"))
    command = MEASURE.replace("pretrained=exported", arguments).replace("hellaswag,arc_easy", "kit_choice,kit_rolling")
    program = Path(sys.executable).with_name("lm_eval")
    options = ("--include_path", "tasks", "--device", "cpu", "--output_path", "found")
    subprocess.run([program, *command.split()[1:], *options], check=True, timeout=TIME_LIMIT, env=os.environ)
    (found,) = Path("found").rglob("results*.json")
    results = json.loads(found.read_text())["results"]
    assert 0 <= results["kit_choice"]["acc,none"] <= 1
    assert results["kit_rolling"]["bits_per_byte,none"] > 0

    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained="exported", device="cpu", prefix_token_id=0)
    [(total, _)] = theirs.loglikelihood([Instance("loglikelihood", {}, ("the king", " is dead"), 0)])
    ours = load(store("runs/gpt2"), 12)
    assert isinstance(ours.vocabulary, TextVocabulary)
    context, whole = (ours.vocabulary.encode(words) for words in ("the king", "the king is dead"))
    with torch.no_grad():
        scores = ours.model.eval().logits(torch.tensor([whole[:-1]])).log_softmax(-1)[0]
    answers = range(len(context), len(whole))
    assert total == pytest.approx(sum(float(scores[i - 1, whole[i]]) for i in answers), abs=1e-4)
