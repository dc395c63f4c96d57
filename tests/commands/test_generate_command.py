"""`mingpt generate`: where prompts come from, several texts, and text that is told as it grows."""

import io
import re
import subprocess
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
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.kinds.gpt import GPTModel
from mingpt.snapshot.store import Store
from snapshot_kit import PROVENANCE, save, state_of
from web_kit import served

Captured = pytest.CaptureFixture[str]
VOCABULARY = "\n abcdé"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A snapshot as the trainer writes it, of a model whose text depends on what it has read."""
    return trained(tmp_path, {"kind": "char", "characters": VOCABULARY}, len(VOCABULARY))


def trained(folder: Path, vocabulary: dict[str, Any], size: int, broken: bool = False) -> Path:
    torch.manual_seed(1)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8}
    model = GPT(GPTConfig(vocab_size=size, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.nan if broken else 30)
    config = {"model": GPTModel.model_validate(shape).model_dump()}
    state = {"model": model.state_dict(), "optimizer": state_of(1)["optimizer"]}
    save(Store(f"{folder}/snapshots"), 1, state, provenance=PROVENANCE | {"vocabulary": vocabulary, "config": config})  # type: ignore[arg-type]
    return folder


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


def test_a_file_or_stdin_is_a_prompt_as_it_stands(
    run: Path, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = said(run, capsys, "--prompt", "ab\ncé\n")
    (tmp_path / "prompt.txt").write_text("ab\ncé\n")
    assert said(run, capsys, "--file", str(tmp_path / "prompt.txt")) == expected
    feed(monkeypatch, "ab\ncé\n".encode())
    assert said(run, capsys, "--file", "-") == expected


def test_each_line_is_a_prompt_and_is_continued_as_if_it_were_alone(
    run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["a", "abcd abc", "cé", "a longer one than a block".replace("longer one than", "bb ccc dddd")]
    prompts[3] = "".join(c for c in prompts[3] if c in VOCABULARY)
    assert len(prompts[3]) > 8
    feed(monkeypatch, ("\n".join(prompts) + "\n\n").encode())
    together = said(run, capsys, "--file", "-", "--lines")
    assert together == BETWEEN.join(said(run, capsys, "--prompt", prompt) for prompt in prompts)


@pytest.mark.parametrize("batch", ["1", "2", "3", "7"])
def test_samples_are_the_same_whatever_the_batch(run: Path, capsys: Captured, batch: str) -> None:
    five = said(run, capsys, "--prompt", "ab", "--samples", "5")
    assert said(run, capsys, "--prompt", "ab", "--samples", "5", "--batch", batch) == five
    texts = five.split(BETWEEN)
    assert len(set(texts)) == len(texts) == 5
    assert all(text.startswith("ab") and len(text) == 2 + 30 + 1 for text in texts)
    assert said(run, capsys, "--prompt", "ab") == texts[0]
    assert said(run, capsys, "--prompt", "ab", "--samples", "3").split(BETWEEN) == texts[:3]


def test_top_p_counts(run: Path, capsys: Captured) -> None:
    greedy = said(run, capsys, "--temperature", "0")
    assert said(run, capsys, "--top-p", "0.0001") == greedy != said(run, capsys, "--top-p", "1")


def test_the_speed_is_told_on_stderr(run: Path, capsys: Captured) -> None:
    assert generate.main([str(run), "--samples", "4", "--tokens", "300", "--speed"]) == 0
    assert re.fullmatch(r"1,200 tokens in [\d.]+ s: [\d,]+ tokens/s\n", capsys.readouterr().err)


class Listener(io.StringIO):
    """What was there to be read at each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def flush(self) -> None:
        self.heard.append(self.getvalue())


def test_text_is_told_as_it_grows_and_the_next_one_after_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Listener()
    monkeypatch.setattr(sys, "stdout", out)
    assert generate.main([str(run), "--prompt", "ab", "--tokens", "5", "--samples", "2"]) == 0
    first, second = out.getvalue().split(BETWEEN)
    whole = out.getvalue()
    assert out.heard[:5] == [first[:3], first[:4], first[:5], first[:6], whole]
    assert len(second) == len("ab") + 5 + 1


def texts_of(chunks: Sequence[Sequence[int]]) -> list[str]:
    """What is told after each chunk of bytes, and at the end."""
    text, out = Text([], 0), []
    for i, chunk in enumerate(chunks):
        text.tokens.extend(chunk)
        out.append(text.new_text(Bytes(), end=i == len(chunks) - 1))
    return out


def test_half_a_character_waits_for_its_rest() -> None:
    assert texts_of([[b] for b in "aé漢😀b".encode()]) == ["a", "", "é", "", "", "漢", "", "", "", "😀", "b"]


def test_what_never_becomes_a_character_is_told_once_that_is_clear() -> None:
    assert texts_of([[0x61], [0xFF], [0xC3], [0x62], [0xC3]]) == ["a", "", "", "\ufffd\ufffdb", "\ufffd"]


def test_what_is_told_is_the_whole_text_however_it_is_cut() -> None:
    drawn = torch.Generator().manual_seed(1)
    for _ in range(300):
        content = torch.tensor([*"aé漢😀\ufffd".encode(), 0xFF, 0xC3])
        row = content[torch.randint(len(content), (12,), generator=drawn)].tolist()
        row[4:4] = list("é漢".encode())
        assert "".join(texts_of([[b] for b in row])) == Bytes().decode(row)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-p", "0"], "--top-p 0.0: above 0 and at most 1"),
        (["--top-p", "1.1"], "--top-p 1.1: above 0 and at most 1"),
        (["--top-p", "nan"], "--top-p nan: above 0 and at most 1"),
        (["--temperature", "inf"], "--temperature inf: a number, 0 or more"),
        (["--samples", "0", "--batch", "0"], "2 problems:\n  1. --samples 0: at least 1\n  2. --batch 0: at least 1"),
        (["--lines"], "--lines splits a file: give --file, too"),
        (["--file", "no/such"], "--file=no/such: there is no such file or bucket: check the spelling"),
    ],
)
def test_bad_options_exit_64(run: Path, capsys: Captured, arguments: list[str], message: str) -> None:
    assert refused(run, capsys, *arguments) == f"error: {message}\n"


@pytest.mark.parametrize(("content", "lines"), [(b"", []), (b"", ["--lines"]), (b"\n\n", ["--lines"])])
def test_an_empty_file_is_a_mistake(
    run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, content: bytes, lines: list[str]
) -> None:
    feed(monkeypatch, content)
    assert refused(run, capsys, "--file", "-", *lines).startswith("error: --file -: it holds nothing to continue")


def test_bytes_that_are_no_text_are_a_mistake_where_tokens_are_text(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = bpe_kit.small()
    run = trained(tmp_path, vocabulary.to_json(), vocabulary.size)
    feed(monkeypatch, b"the \xff")
    assert refused(run, capsys, "--file", "-") == "error: the text is not UTF-8 at character 4: convert it\n"


def test_of_plain_numbers_the_first_one_is_continued(tmp_path: Path, capsys: Captured) -> None:
    run = trained(tmp_path, {"kind": "numbers", "size": 5}, 5)
    out = said(run, capsys)
    assert out == said(run, capsys, "--prompt", "0")
    assert out.split()[0] == "0"
    assert len(out.split()) == 31


@pytest.mark.parametrize("temperature", ["1e-46", "1e-320"])
def test_next_to_no_temperature_is_none(run: Path, capsys: Captured, temperature: str) -> None:
    assert said(run, capsys, "--temperature", temperature) == said(run, capsys, "--temperature", "0")


def test_a_prompt_and_a_file_are_too_much(run: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        generate.main([str(run), "--prompt", "a", "--file", "-"])
    assert ended.value.code == 64


def test_weights_that_are_no_numbers_are_a_mistake(tmp_path: Path, capsys: Captured) -> None:
    run = trained(tmp_path, {"kind": "char", "characters": VOCABULARY}, len(VOCABULARY), broken=True)
    assert "its weights are not all finite numbers" in refused(run, capsys)


@pytest.mark.slow
def test_a_reader_that_has_enough_ends_it_quietly(run: Path) -> None:
    command = [sys.executable, "-m", "mingpt.generate", str(run), "--tokens", "1000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    process.stdout.read(20)
    process.stdout.close()
    assert process.stderr
    assert (process.stderr.read(), process.wait(200)) == (b"", 0)


def hostile(folder: Path, manifest: dict[str, Any], model: GPT | None = None) -> Path:
    """A snapshot whose weights are a good GPT's and whose manifest says something else."""
    model = model or GPT(GPTConfig(vocab_size=7, n_layer=1, n_head=2, n_embd=8, block_size=8))
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8}
    provenance = {"vocabulary": {"kind": "char", "characters": VOCABULARY}, "config": {"model": shape}} | manifest
    state = {"model": model.state_dict(), "optimizer": state_of(1)["optimizer"]}
    save(Store(f"{folder}/snapshots"), 1, state, provenance=PROVENANCE | provenance)  # type: ignore[arg-type]
    return folder


def of_model(**changes: int) -> dict[str, Any]:
    return {"config": {"model": {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8} | changes}}


OTHER = "not a snapshot of a GPT of this version: "


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        (of_model(n_head=3), f"{OTHER}model.n_head=3 does not divide model.n_embd=8"),
        (of_model(n_layer=2), f"{OTHER}n_layer=2, and 16 tensors"),
        (of_model(n_layer=2**31 - 1), f"{OTHER}n_layer=2147483647, and 16 tensors"),
        (of_model(n_embd=16), rf"{OTHER}transformer.wte.weight should be F32 \[7, 16\], and is F32 \[7, 8\]"),
        (of_model(block_size=2**31 - 1), rf"{OTHER}transformer.wpe.weight should be F32 \[2147483647, 8\], and is F32"),
        ({"vocabulary": {"kind": "numbers", "size": 2**70}}, OTHER),
        ({"vocabulary": {"kind": "numbers", "size": 2**62}}, OTHER),
        ({"vocabulary": {"kind": "numbers", "size": 8}}, rf"{OTHER}transformer.wte.weight should be F32 \[8, 8\]"),
        ({"config": {}}, OTHER),
        ({"config": {"model": [1]}}, OTHER),
    ],
)
def test_a_manifest_that_describes_another_model_is_one_line(
    tmp_path: Path, capsys: Captured, manifest: dict[str, Any], problem: str
) -> None:
    line = refused(hostile(tmp_path, manifest), capsys)
    assert re.match(f"error: {tmp_path}/snapshots/step-000000001: {problem}", line)
    assert line.count("\n") == 1


@pytest.mark.parametrize("change", [torch.Tensor.half, torch.Tensor.bool, torch.Tensor.double])
def test_weights_of_another_type_are_not_those_of_a_gpt(
    tmp_path: Path, capsys: Captured, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = GPT(GPTConfig(vocab_size=7, n_layer=1, n_head=2, n_embd=8, block_size=8))
    state = {n: change(t) if "ln_f.bias" in n else t for n, t in model.state_dict().items()}
    model.state_dict = lambda: state  # type: ignore[method-assign, assignment]
    assert "transformer.ln_f.bias should be F32 [8], and is " in refused(hostile(tmp_path, {}, model), capsys)


@pytest.mark.parametrize("temperature", ["0", "1"])
@pytest.mark.parametrize("options", [(), ("--top-k", "2"), ("--top-p", "0.5")])
def test_weights_that_are_numbers_and_whose_logits_are_none_are_one_line(
    tmp_path: Path, capsys: Captured, temperature: str, options: tuple[str, ...]
) -> None:
    """A run that has diverged: no weight of it is nan yet, and its activations overflow."""
    model = GPT(GPTConfig(vocab_size=7, n_layer=1, n_head=2, n_embd=8, block_size=8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3e38)
    line = refused(hostile(tmp_path, {}, model), capsys, "--temperature", temperature, *options)
    assert line == (
        f"error: {tmp_path}/snapshots/step-000000001: its logits are not all finite numbers: its run has diverged; "
        f"choose another with --step\n"
    )


def test_no_secret_of_an_address_is_shown(tmp_path: Path, capsys: Captured) -> None:
    hostile(tmp_path / "text", {"vocabulary": {"kind": "char", "characters": VOCABULARY}})
    with served(tmp_path) as url:
        url = url.replace("//", "//user:S3CRET@")
        for arguments in (
            [f"{url}/nowhere"],
            [f"{url}/text", "--file", f"{url}/nowhere?sig=S3CRET"],
        ):
            assert generate.main(arguments) == 64
            out, err = capsys.readouterr()
            assert "***@127.0.0.1" in err
            assert "S3CRET" not in out + err


def test_a_device_that_is_not_there_is_refused(run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refused(run, capsys, "--device", "cuda").startswith("error: --device cuda: torch finds no GPU here")
    assert said(run, capsys, "--device", "cpu") == said(run, capsys)


def test_the_model_goes_to_the_device(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = list[str]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(GPT, "to", lambda model, device: moved.append(str(device)))
    monkeypatch.setattr(generate, "continue_texts", lambda *texts: None)
    for device in ("auto", "cpu", "cuda"):
        assert generate.main([str(run), "--device", device]) == 0
    assert moved == ["cuda", "cpu", "cuda"]
