"""python -m mingpt.snapshots export: what it writes, transformers itself reads, with the same logits."""

from pathlib import Path

import fsspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import GPT2LMHeadModel

from mingpt.commands import generate, snapshots
from mingpt.data.vocabulary import Characters, NoTokens, Numbers, Vocabulary
from mingpt.model.gpt2 import GPT, GPTModel
from mingpt.snapshot.store import Store
from mingpt.weights.reading import start_from
from snapshot_kit import PROVENANCE, save, state_of
from weights_kit import ALONE, logits, ours, saved, shape, tokens

Captured = pytest.CaptureFixture[str]


def train(folder: Path, model: GPT, vocabulary: Vocabulary) -> None:
    """A snapshot as the trainer writes it."""
    c = model.config
    section = GPTModel(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, block_size=c.block_size,
                    vocab_multiple=c.vocab_multiple)  # fmt: skip
    provenance = PROVENANCE | {"vocabulary": vocabulary.to_json(), "config": {"model": section.model_dump()}}
    state = {"model": model.state_dict(), "optimizer": state_of(1)["optimizer"]}
    save(Store(f"{folder}/snapshots"), 1, state, provenance=provenance)  # type: ignore[arg-type]


def export(run: Path, target: object, *options: str) -> int:
    return snapshots.main(["export", str(run), str(target), *options])


def test_transformers_loads_it_and_computes_the_same_bits(tmp_path: Path, capsys: Captured) -> None:
    model = ours(shape(vocab_multiple=64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    train(tmp_path, model, Numbers(37))
    assert export(tmp_path, tmp_path / "out") == 0
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()
    # Rows of padding only fill up tiles, and with them a kernel may choose another order of additions.
    wanted = logits(model, tokens())
    assert (logits(theirs, tokens()) - wanted).abs().max() <= 2e-6 * wanted.abs().max()
    unpadded = ours(shape())
    start_from(unpadded, str(tmp_path / "out"), Numbers(37), ALONE)
    assert torch.equal(logits(theirs, tokens()), logits(unpadded, tokens()))
    assert theirs.config.bos_token_id is None
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert f"{tmp_path}/out" in capsys.readouterr().out


@pytest.mark.parametrize("multiple", [1, 64])
def test_import_and_export_give_back_the_same_bytes(tmp_path: Path, multiple: int) -> None:
    saved(tmp_path / "theirs")
    model = ours(shape(vocab_multiple=multiple))
    start_from(model, str(tmp_path / "theirs"), Numbers(37), ALONE)
    train(tmp_path, model, Numbers(37))
    assert export(tmp_path, tmp_path / "out") == 0
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.int32), after[name].view(torch.int32)) for name in before)


def test_a_character_that_the_model_never_saw_is_an_error_there_too(tmp_path: Path) -> None:
    train(tmp_path, ours(shape(vocab_size=3)), Characters("abc"))
    assert export(tmp_path, tmp_path / "out") == 0
    with pytest.raises(Exception, match="UNK"):
        Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("abx")


def test_nothing_is_overwritten_without_being_told(tmp_path: Path, capsys: Captured) -> None:
    train(tmp_path, ours(shape()), Numbers(37))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    assert export(tmp_path, tmp_path / "out") == 64
    assert "--overwrite" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["config.json"]
    assert export(tmp_path, tmp_path / "out", "--overwrite") == 0
    assert export(tmp_path, tmp_path / "out" / "config.json") == 64


def test_a_url_will_do(tmp_path: Path) -> None:
    train(tmp_path, ours(shape()), Numbers(37))
    assert export(tmp_path, "memory://exported/gpt2") == 0
    assert export(tmp_path, tmp_path / "out") == 0
    fs = fsspec.filesystem("memory")
    for file in (tmp_path / "out").iterdir():
        assert fs.cat_file(f"/exported/gpt2/{file.name}") == file.read_bytes()


def test_a_damaged_snapshot_is_not_exported(tmp_path: Path) -> None:
    train(tmp_path, ours(shape()), Numbers(37))
    (part,) = (tmp_path / "snapshots" / "step-000000001").glob("model-*")
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    assert export(tmp_path, tmp_path / "out") == 1
    assert not (tmp_path / "out").exists()


def test_a_snapshot_of_ones_own_model_is_named_and_not_imported(tmp_path: Path, capsys: Captured) -> None:
    """`this` prints when it is imported."""
    section = {"kind": "own", "_target_": "this.is_not_imported", "block_size": 1}
    provenance = PROVENANCE | {"vocabulary": NoTokens().to_json(), "config": {"model": section}}
    save(Store(f"{tmp_path}/snapshots"), 1, provenance=provenance)
    for command in ("list", "show", "verify"):
        assert snapshots.main([command, str(tmp_path)]) == 0
    assert snapshots.main(["copy", str(tmp_path), str(tmp_path / "copy")]) == 0
    assert "Namespaces" not in capsys.readouterr().out
    for main, arguments in ((snapshots.main, ["export", str(tmp_path), str(tmp_path / "out")]),
                            (generate.main, [str(tmp_path)])):  # fmt: skip
        assert main(arguments) == 64
        assert "'this.is_not_imported'" in capsys.readouterr().err
