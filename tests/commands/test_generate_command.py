"""`mingpt generate`: where prompts come from, several texts, text that is told as it grows, and what is refused."""

import argparse
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mingpt.cli import cli
from mingpt.cli.console import escaped
from mingpt.commands.generate import BETWEEN, Text, prompts_of
from mingpt.config.models import GPTModel
from mingpt.data.vocabulary import Bytes
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.sampling import generate as continue_tokens
from tests.kits import bpe_kit
from tests.kits.snapshot_kit import PROVENANCE, save, state_of
from tests.kits.told import Told
from tests.kits.verb_kit import mingpt, store

SHAPE = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8}
VOCABULARY = "\n abcdé"
CHARS = {"kind": "char", "characters": VOCABULARY}
Change = Callable[[torch.Tensor], torch.Tensor]


def snapshot(
    step: int = 1, vocabulary: dict[str, Any] = CHARS, size: int = len(VOCABULARY),
    change: Change = lambda weight: weight * 30, **manifest: Any,
) -> GPT:  # fmt: skip
    """As the trainer writes it, of a model whose text depends on what it has read. change: of each weight."""
    torch.manual_seed(step)
    model = GPT(GPTConfig(vocab_size=size, **SHAPE))
    weights = {name: change(weight) for name, weight in model.state_dict().items()}
    described = {"vocabulary": vocabulary, "config": {"model": GPTModel.model_validate(SHAPE).model_dump()}} | manifest
    state: Any = {"model": weights, "optimizer": state_of(1)["optimizer"]}
    save(store(), step, state, provenance=PROVENANCE | described)
    model.load_state_dict(weights)
    return model


@pytest.fixture(autouse=True)
def run(here: None) -> None:
    snapshot()


def said(options: str, *prompt: str) -> str:
    out = mingpt(f"generate run --tokens 30 --temperature 20 {options}", *prompt)
    assert mingpt.err == ""
    return out


def feed(monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode(errors="surrogateescape"))))


def test_it_continues_the_prompt_with_the_newest_model_and_each_option_counts() -> None:
    older, newer = snapshot(9), snapshot(10)
    ids = torch.tensor([[VOCABULARY.index(c) for c in "ab a"]])
    options = {"temperature": 30.0, "top_k": 2, "seed": 7}
    texts = list[str]()
    for model, step in ((newer, ""), (older, " --step 9")):
        for changed in ({}, {"seed": 8}, {"top_k": None}, {"temperature": 0.01}):
            used = options | changed
            row = continue_tokens(model, ids, 30, **used)[0].tolist()
            given = " ".join(f"--{name.replace('_', '-')}={value}" for name, value in used.items() if value)
            texts.append(said(given + step, "--prompt", "ab a"))
            assert texts[-1] == "".join(VOCABULARY[i] for i in row) + "\n"
    assert len(set(texts)) == len(texts)
    assert said("--top-p 0.0001") == said("--temperature 0") != said("--top-p 1")


def test_a_file_or_stdin_is_a_prompt_as_it_stands_or_each_line_one_as_if_it_were_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = ["a", "abcd abc", "cé", "a bb ccc dddd abc"]  # the last one is longer than a block
    whole = "\n".join([*prompts, "", ""])
    Path("prompt.txt").write_text(whole)
    for file in ("prompt.txt", "-"):
        feed(monkeypatch, whole)
        assert said(f"--file {file}") == said("--prompt", whole)
    feed(monkeypatch, whole)
    together = said("--file - --lines")
    assert together == BETWEEN.join(said("--prompt", prompt) for prompt in prompts)
    for content, lines in (("", ""), ("\n\n", "--lines"), ("a\udcff", "")):  # no text, or one of other characters
        feed(monkeypatch, content)
        mingpt.refused(f"generate run --file - {lines}")


def test_a_line_of_a_file_ends_with_a_line_feed_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a byte-order mark part of the first one."""
    feed(monkeypatch, "\ufeffa\x0bb\x0cc\x1cd\x85e\u2028f\u2029g\rh\r\r\n\r\nb\n")
    options = argparse.Namespace(file="-", lines=True)
    assert prompts_of(options, Bytes()) == ["a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g\rh\r", "b"]


def test_text_is_told_as_it_grows_and_the_next_one_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = list[str]()

    class Listener(io.StringIO):
        def flush(self) -> None:
            heard.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", out := Listener())
    cli.run("generate", ["run", "--prompt=ab", "--tokens=5", "--samples=2"])
    first, second = out.getvalue().split(BETWEEN)
    assert heard[:5] == [*(first[:n] for n in (3, 4, 5, 6)), out.getvalue()]
    assert len(second) == len("ab") + 5 + 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("aé漢😀b".encode(), ["a", "", "é", "", "", "漢", "", "", "", "😀", "b"]),
        (b"a\xff\xc3b\xc3", ["a", "", "", "\ufffd\ufffdb", "\ufffd"]),
    ],
)
def test_half_a_character_waits_for_its_rest_or_until_it_is_clear_that_there_is_none(
    content: bytes, told: list[str]
) -> None:
    text = Text([], 0)
    for i, part in enumerate(told, 1):
        text.tokens.append(content[i - 1])
        assert text.new_text(Bytes(), end=i == len(content)) == part


def test_bytes_are_decoded_and_no_code_moves_the_cursor() -> None:
    """U+DCFF is what Python makes of a byte FF on the command line."""
    model = snapshot(2, {"kind": "byte", "characters": ""}, 256)
    ids = continue_tokens(model, torch.tensor([list("é".encode())]), 30, temperature=0)[0].tolist()
    assert said("--prompt é --temperature 0") == escaped(bytes(ids).decode(errors="replace")) + "\n"
    mingpt("generate run --prompt \udcff")
    mingpt.refused("generate run --prompt \ud800")


@pytest.mark.parametrize(
    "arguments",
    [
        "--top-p=1.1", "--top-p=nan", "--temperature=inf --tokens=0", "--samples=0 --batch=0",
        "--prompt= --temperature=-1 --top-k=0", "--lines", "--file=no/such", "--prompt=zxa", "--device=cuda",
    ],
)  # fmt: skip
def test_bad_options_exit_64(arguments: str, told: Told) -> None:
    if not torch.cuda.is_available() or "cuda" not in arguments:
        told(mingpt.refused(f"generate run {arguments}"))


def test_without_a_prompt_it_begins_with_a_line_feed_or_the_first_of_plain_numbers() -> None:
    assert said("") == said("--prompt", "\n")
    snapshot(2, {"kind": "char", "characters": "ab"}, 2)
    assert "--prompt" in mingpt.refused("generate run")
    snapshot(3, {"kind": "numbers", "size": 5}, 5)
    assert said("") == said("--prompt 0")
    small = bpe_kit.small()
    snapshot(4, small.to_json(), small.size)
    assert said("--prompt the").startswith("the")


def test_it_needs_no_good_optimizer_but_a_good_model(tmp_path: Path) -> None:
    [optimizer], [model] = tmp_path.rglob("optimizer-*"), tmp_path.rglob("model-*")
    for path in (optimizer, model):
        said("")
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert model.name in mingpt.refused("generate run")


def of_model(**changes: int) -> dict[str, Any]:
    return {"config": {"model": SHAPE | changes}}


@pytest.mark.parametrize(
    ("manifest", "key"),
    [
        (of_model(n_head=3), "n_head=3"),
        (of_model(n_layer=2**31 - 1), "n_layer=2147483647"),
        (of_model(n_embd=16), "wte"),
        ({"vocabulary": {"kind": "numbers", "size": 2**70}}, ""),
        ({"vocabulary": {"kind": "numbers", "size": 8}}, "wte"),
        ({"config": {}}, ""),
        ({"change": torch.Tensor.half}, "transformer."),
        ({"change": lambda weight: weight * torch.nan}, "finite"),
        # Of a run that has diverged: no weight is nan yet, and its activations overflow.
        ({"change": lambda weight: torch.full_like(weight, 3e38)}, "logits"),
    ],
)
def test_a_manifest_or_weights_of_something_else_are_one_line(manifest: dict[str, Any], key: str) -> None:
    snapshot(2, **manifest)
    [line] = mingpt.refused("generate run --top-p=0.5").splitlines()
    assert line.startswith("error: run/snapshots/step-000000002: ")
    assert key in line
