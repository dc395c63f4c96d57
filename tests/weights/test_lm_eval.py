"""lm-eval measures what `mingpt export` writes, by the command of docs/workloads-evaluate-generate.md."""

import json
import math
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
from tests.kits.verb_kit import mingpt, store

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
PAGE = (ROOT / "docs/workloads-evaluate-generate.md").read_text()
EXPORT, MEASURE = re.findall(r"^(mingpt export .*)\n(lm_eval --model hf .*)$", PAGE, re.M)[0]
CHARACTERS = "pretrained=exported,prefix_token_id=0"  # they have no end of text
TEXT, QUESTIONS, CHOICES = "the king is dead long live the queen", ("the king", "O woe"), [" to", " the", " and all"]
# Of two kinds of request.
TASKS = {
    "kit_choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "{{gold}}",
        "doc_to_choice": "{{choices}}", "metric_list": [{"metric": "acc"}],
    },
    "kit_rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": TEXT,
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}  # fmt: skip


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
    ours = load(store("runs/gpt2"), 12)
    vocabulary = ours.vocabulary
    assert isinstance(vocabulary, TextVocabulary)

    def likely(before: list[int], words: str) -> float:
        """The logarithm of the probability of these words after these tokens."""
        whole = [*before, *vocabulary.encode(words)]
        with torch.no_grad():
            scores = ours.model.logits(torch.tensor([whole[:-1]])).log_softmax(-1)[0]
        return sum(float(scores[i - 1, whole[i]]) for i in range(len(before), len(whole)))

    rows = list[dict[str, object]]()
    for question in QUESTIONS:
        found = [likely(vocabulary.encode(question), choice) for choice in CHOICES]
        rows.append({"question": question, "choices": CHOICES, "gold": found.index(max(found))})
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("tasks").mkdir()
    options = {"data_files": {"test": "rows.jsonl"}, "cache_dir": "cache"}
    for name, task in TASKS.items():
        fields = {"task": name, "dataset_path": "json", "test_split": "test", "dataset_kwargs": options, **task}
        Path(f"tasks/{name}.yaml").write_text(json.dumps(fields))
    command = MEASURE.replace("pretrained=exported", arguments).replace("hellaswag,arc_easy", ",".join(TASKS))
    program = Path(sys.executable).with_name("lm_eval")
    more = ("--include_path", "tasks", "--device", "cpu", "--output_path", "found")
    subprocess.run([program, *command.split()[1:], *more], check=True, timeout=TIME_LIMIT, env=os.environ)
    (path,) = Path("found").rglob("results*.json")
    results = json.loads(path.read_text())["results"]
    assert results["kit_choice"]["acc,none"] == 1
    first = json.loads(Path("exported/config.json").read_text())["bos_token_id"] or 0
    bits = -likely([first], TEXT) / math.log(2)
    assert results["kit_rolling"]["bits_per_byte,none"] == pytest.approx(bits / len(TEXT), rel=1e-5)
