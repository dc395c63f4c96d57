"""mingpt snapshots export: what it writes, transformers itself reads, with the same logits."""

from dataclasses import asdict
from pathlib import Path

import fsspec
import pytest
import torch
from transformers import GPT2LMHeadModel

from mingpt.cli import cli
from mingpt.data.source import Vocabulary
from mingpt.data.vocabulary import NoTokens, Numbers
from mingpt.model.gpt2 import GPT
from mingpt.snapshot.store import Store
from mingpt.weights.reading import start_from
from tests.kits.model_kit import random_tokens, vivid
from tests.kits.snapshot_kit import ALONE, PROVENANCE, save, state_of
from tests.kits.weights_kit import WORDS, logits, ours

Captured = pytest.CaptureFixture[str]


def train(folder: Path, model: GPT, vocabulary: Vocabulary) -> None:
    """A snapshot as the trainer writes it."""
    section = {n: value for n, value in asdict(model.config).items() if n != "vocab_size"} | {"kind": "gpt"}
    provenance = PROVENANCE | {"vocabulary": vocabulary.to_json(), "config": {"model": section}}
    state = {"model": model.state_dict(), "optimizer": state_of(1)["optimizer"]}
    save(Store(f"{folder}/snapshots"), 1, state, provenance=provenance)  # type: ignore[arg-type]


def export(run: Path, target: object, *options: str) -> int:
    return cli.run("snapshots", ["export", str(run), str(target), *options])


def test_transformers_loads_it_and_computes_the_same_bits(tmp_path: Path) -> None:
    model, tokens = vivid(ours(vocab_multiple=64)), random_tokens(3, 16, WORDS)
    train(tmp_path, model, Numbers(WORDS))
    assert export(tmp_path, tmp_path / "out") == 0
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()
    # Rows of padding only fill up tiles, and with them a kernel may choose another order of additions.
    wanted = logits(model, tokens)
    assert (logits(theirs, tokens) - wanted).abs().max() <= 2e-6 * wanted.abs().max()
    unpadded = ours()
    start_from(unpadded, str(tmp_path / "out"), Numbers(WORDS), ALONE)
    assert torch.equal(logits(theirs, tokens), logits(unpadded, tokens))
    assert theirs.config.bos_token_id is None


def test_nothing_is_overwritten_without_being_told_a_url_will_do_and_a_damaged_snapshot_is_not_exported(
    tmp_path: Path, capsys: Captured
) -> None:
    train(run := tmp_path, ours(), Numbers(WORDS))
    (out := run / "out").mkdir()
    (out / "config.json").write_text("mine")
    assert export(run, out) == 64
    assert "--overwrite" in capsys.readouterr().err
    assert [p.name for p in out.iterdir()] == ["config.json"]
    assert export(run, out, "--overwrite") == export(run, "memory://exported/gpt2") == 0
    for file in out.iterdir():
        assert fsspec.filesystem("memory").cat_file(f"/exported/gpt2/{file.name}") == file.read_bytes()
    (part,) = run.rglob("model-*")
    part.write_bytes(part.read_bytes()[:-1] + b"\xff")
    assert export(run, run / "new") == 1
    assert not (run / "new").exists()


def test_a_snapshot_of_ones_own_model_is_named_and_not_imported(tmp_path: Path, capsys: Captured) -> None:
    """`this` prints when it is imported."""
    section = {"kind": "own", "_target_": "this.is_not_imported", "block_size": 1}
    provenance = PROVENANCE | {"vocabulary": NoTokens().to_json(), "config": {"model": section}}
    save(Store(f"{tmp_path}/snapshots"), 1, provenance=provenance)
    for command in ("list", "show", "verify"):
        assert cli.run("snapshots", [command, str(tmp_path)]) == 0
    assert "Namespaces" not in capsys.readouterr().out
    assert export(tmp_path, tmp_path / "out") == 64
    assert "'this.is_not_imported'" in capsys.readouterr().err
