"""`mingpt generate`: where prompts come from, several texts, text that is told as it grows, and what is refused."""

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import bpe_kit
from mingpt.commands import generate
from mingpt.commands.generate import BETWEEN, Text
from mingpt.data.vocabulary import Bytes
from mingpt.model.gpt2 import GPT, GPTConfig, GPTModel
from mingpt.model.sampling import generate as continue_tokens
from mingpt.redact import escaped
from mingpt.snapshot.store import Store
from snapshot_kit import PROVENANCE, save, state_of
from told import Told

Captured = pytest.CaptureFixture[str]
SHAPE = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8}
VOCABULARY = "\n abcdé"
CHARS = {"kind": "char", "characters": VOCABULARY}
BYTES = {"kind": "byte", "characters": ""}
Change = Callable[[torch.Tensor], torch.Tensor]


def snapshot(
    folder: Path, step: int = 1, vocabulary: dict[str, Any] = CHARS, size: int = len(VOCABULARY),
    change: Change = lambda weight: weight * 30, **manifest: Any,
) -> GPT:  # fmt: skip
    """As the trainer writes it, of a model whose text depends on what it has read. change: of each weight."""
    torch.manual_seed(step)
    model = GPT(GPTConfig(vocab_size=size, **SHAPE))
    weights = {name: change(weight) for name, weight in model.state_dict().items()}
    described = {"vocabulary": vocabulary, "config": {"model": GPTModel.model_validate(SHAPE).model_dump()}} | manifest
    state = {"model": weights, "optimizer": state_of(1)["optimizer"]}
    save(Store(f"{folder}/snapshots"), step, state, provenance=PROVENANCE | described)  # type: ignore[arg-type]
    if all(weight.dtype == torch.float32 for weight in weights.values()):
        model.load_state_dict(weights)
    return model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    snapshot(tmp_path)
    return tmp_path


def said(run: Path, capsys: Captured, *arguments: str) -> str:
    assert generate.main([str(run), "--tokens", "30", "--temperature", "20", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(run: Path, capsys: Captured, *arguments: str) -> str:
    assert generate.main([str(run), *arguments]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    return err


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_it_continues_the_prompt_with_the_newest_model_and_each_option_counts(tmp_path: Path, capsys: Captured) -> None:
    older, newer = snapshot(tmp_path, 9), snapshot(tmp_path, 10)
    ids = torch.tensor([[VOCABULARY.index(c) for c in "ab a"]])
    options = {"temperature": 30.0, "top_k": 2, "seed": 7}
    texts = list[str]()
    for model, step in ((newer, ()), (older, ("--step", "9"))):
        for changed in ({}, {"seed": 8}, {"top_k": None}, {"temperature": 0.01}):
            used = options | changed
            row = continue_tokens(model, ids, 30, **used)[0].tolist()
            given = (f"--{name.replace('_', '-')}={value}" for name, value in used.items() if value)
            texts.append(said(tmp_path, capsys, "--prompt", "ab a", *given, *step))
            assert texts[-1] == "".join(VOCABULARY[i] for i in row) + "\n"
    assert len(set(texts)) == len(texts)


def test_a_file_or_stdin_is_a_prompt_as_it_stands(
    run: Path, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = said(run, capsys, "--prompt", "ab\ncé\n")
    (tmp_path / "prompt.txt").write_text("ab\ncé\n")
    feed(monkeypatch, "ab\ncé\n".encode())
    for file in (f"{tmp_path}/prompt.txt", "-"):
        assert said(run, capsys, "--file", file) == expected


def test_each_line_is_a_prompt_and_is_continued_as_if_it_were_alone(
    run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["a", "abcd abc", "cé", "a bb ccc dddd abc"]  # the last one is longer than a block
    feed(monkeypatch, ("\n".join(prompts) + "\n\n").encode())
    together = said(run, capsys, "--file", "-", "--lines")
    assert together == BETWEEN.join(said(run, capsys, "--prompt", prompt) for prompt in prompts)


@pytest.mark.parametrize("batch", ["1", "3", "7"])
def test_samples_are_the_same_whatever_the_batch(run: Path, capsys: Captured, batch: str) -> None:
    five = said(run, capsys, "--prompt", "ab", "--samples", "5")
    assert said(run, capsys, "--prompt", "ab", "--samples", "5", "--batch", batch) == five
    texts = five.split(BETWEEN)
    assert len(set(texts)) == 5
    assert said(run, capsys, "--prompt", "ab", "--samples", "2").split(BETWEEN) == texts[:2]


def test_next_to_no_temperature_and_a_small_top_p_take_the_likeliest(run: Path, capsys: Captured) -> None:
    greedy = said(run, capsys, "--temperature", "0")
    assert said(run, capsys, "--top-p", "0.0001") == greedy != said(run, capsys, "--top-p", "1")
    for temperature in ("1e-46", "1e-320"):
        assert said(run, capsys, "--temperature", temperature) == greedy


def test_text_is_told_as_it_grows_and_the_next_one_after_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = list[str]()

    class Listener(io.StringIO):
        def flush(self) -> None:
            heard.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", out := Listener())
    assert generate.main([str(run), "--prompt", "ab", "--tokens", "5", "--samples", "2"]) == 0
    first, second = out.getvalue().split(BETWEEN)
    assert heard[:5] == [*(first[:n] for n in (3, 4, 5, 6)), out.getvalue()]
    assert len(second) == len("ab") + 5 + 1


def texts_of(chunks: Sequence[int]) -> list[str]:
    """What is told after each byte, and at the end."""
    text, out = Text([], 0), list[str]()
    for i, byte in enumerate(chunks, 1):
        text.tokens.append(byte)
        out.append(text.new_text(Bytes(), end=i == len(chunks)))
    return out


def test_half_a_character_waits_for_its_rest_or_until_it_is_clear_that_there_is_none() -> None:
    assert texts_of("aé漢😀b".encode()) == ["a", "", "é", "", "", "漢", "", "", "", "😀", "b"]
    assert texts_of(b"a\xff\xc3b\xc3") == ["a", "", "", "\ufffd\ufffdb", "\ufffd"]
    drawn = torch.Generator().manual_seed(1)
    for _ in range(300):
        content = torch.tensor([*"aé漢😀\ufffd".encode(), 0xFF, 0xC3])
        row = content[torch.randint(len(content), (12,), generator=drawn)].tolist()
        row[4:4] = list("é漢".encode())
        assert "".join(texts_of(row)) == Bytes().decode(row)


def test_bytes_are_decoded_and_no_code_moves_the_cursor(tmp_path: Path, capsys: Captured) -> None:
    """U+DCFF is what Python makes of a byte FF on the command line."""
    model = snapshot(tmp_path, vocabulary=BYTES, size=256)
    ids = continue_tokens(model, torch.tensor([list("é".encode())]), 30, temperature=0)[0].tolist()
    out = said(tmp_path, capsys, "--prompt", "é", "--temperature", "0")
    assert out == escaped(bytes(ids).decode(errors="replace")) + "\n"
    assert generate.main([str(tmp_path), "--prompt", "\udcff"]) == 0
    capsys.readouterr()
    refused(tmp_path, capsys, "--prompt", "\ud800")


@pytest.mark.parametrize(
    "arguments",
    [
        "--top-p=0", "--top-p=1.1", "--top-p=nan", "--temperature=inf --tokens=0", "--samples=0 --batch=0",
        "--prompt= --temperature=-1 --top-k=0", "--lines", "--file=no/such", "--prompt=zxa", "--device=cuda",
    ],
)  # fmt: skip
def test_bad_options_exit_64(run: Path, capsys: Captured, told: Told, arguments: str) -> None:
    if not torch.cuda.is_available() or "cuda" not in arguments:
        told(refused(run, capsys, *arguments.split()), run)


@pytest.mark.parametrize(("content", "lines"), [(b"", ()), (b"\n\n", ("--lines",)), (b"a\xff", ())])
def test_a_file_without_text_is_a_mistake(
    run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, content: bytes, lines: tuple[str, ...]
) -> None:
    feed(monkeypatch, content)
    refused(run, capsys, "--file", "-", *lines)


def test_without_a_prompt_it_begins_with_a_line_feed_or_the_first_of_plain_numbers(
    tmp_path: Path, capsys: Captured
) -> None:
    snapshot(tmp_path, 1, {"kind": "char", "characters": "ab"}, 2)
    assert "--prompt" in refused(tmp_path, capsys)
    snapshot(tmp_path, 2)
    assert said(tmp_path, capsys) == said(tmp_path, capsys, "--prompt", "\n")
    snapshot(tmp_path, 3, {"kind": "numbers", "size": 5}, 5)
    assert said(tmp_path, capsys) == said(tmp_path, capsys, "--prompt", "0")
    small = bpe_kit.small()
    snapshot(tmp_path, 4, small.to_json(), small.size)
    assert said(tmp_path, capsys, "--prompt", "the").startswith("the")


def test_it_needs_no_good_optimizer_but_a_good_model(run: Path, capsys: Captured) -> None:
    [optimizer], [model] = run.rglob("optimizer-*"), run.rglob("model-*")
    optimizer.write_bytes(optimizer.read_bytes()[:-1] + b"\xff")
    said(run, capsys)
    model.write_bytes(model.read_bytes()[:-1] + b"\xff")
    assert model.name in refused(run, capsys)


def of_model(**changes: int) -> dict[str, Any]:
    return {"config": {"model": SHAPE | changes}}


@pytest.mark.parametrize(
    ("manifest", "key"),
    [
        (of_model(n_head=3), "n_head=3"),
        (of_model(n_layer=2), "n_layer=2, "),
        (of_model(n_layer=2**31 - 1), "n_layer=2147483647"),
        (of_model(n_embd=16), "wte"),
        (of_model(block_size=2**31 - 1), "wpe"),
        ({"vocabulary": {"kind": "numbers", "size": 2**70}}, ""),
        ({"vocabulary": {"kind": "numbers", "size": 2**62}}, ""),
        ({"vocabulary": {"kind": "numbers", "size": 8}}, "wte"),
        ({"config": {}}, ""),
        ({"config": {"model": [1]}}, ""),
        *(({"change": change}, "transformer.") for change in (torch.Tensor.half, torch.Tensor.bool)),
        ({"change": lambda weight: weight * torch.nan}, "finite"),
    ],
)
def test_a_manifest_or_weights_of_something_else_are_one_line(
    tmp_path: Path, capsys: Captured, manifest: dict[str, Any], key: str
) -> None:
    snapshot(tmp_path, **manifest)
    [line] = refused(tmp_path, capsys).splitlines()
    assert line.startswith(f"error: {tmp_path}/snapshots/step-000000001: ")
    assert key in line


@pytest.mark.parametrize("options", ["--temperature=0", "--top-k=2", "--top-p=0.5"])
def test_weights_that_are_numbers_and_whose_logits_are_none_are_one_line(
    tmp_path: Path, capsys: Captured, options: str
) -> None:
    """A run that has diverged: no weight of it is nan yet, and its activations overflow."""
    snapshot(tmp_path, change=lambda weight: torch.full_like(weight, 3e38))
    assert "logits" in refused(tmp_path, capsys, options)


def test_the_model_goes_to_the_device(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = list[str]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(GPT, "to", lambda model, device: moved.append(str(device)))
    monkeypatch.setattr(generate, "continue_texts", lambda *texts: None)
    for device in ("auto", "cpu", "cuda"):
        assert generate.main([str(run), "--device", device]) == 0
    assert moved == ["cuda", "cpu", "cuda"]
