"""model.init_from: the weights of transformers' own GPT-2 give the same logits here; what does not fit is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from mingpt.data.vocabulary import Bytes, Characters, Numbers
from mingpt.errors import UserError
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.weights.fitting import form_of
from mingpt.weights.reading import read_weights, start_from
from mingpt.weights.tokenizer import tokenizer_files
from told import Told
from weights_kit import ALONE, change_config, change_weights, logits, ours, saved, shape, tokens

FORM = form_of(ours(shape()))
V37 = Numbers(37)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "gpt2"


def loaded(url: object, config: GPTConfig | None = None, vocabulary: Any = V37) -> GPT:
    model = ours(config or shape())
    start_from(model, str(url), vocabulary, ALONE)
    return model


def test_the_logits_are_those_of_transformers_to_the_bit(folder: Path) -> None:
    """With the same kernel for the same activation, there is no difference at all."""
    theirs = saved(folder, activation_function="gelu_pytorch_tanh")
    assert torch.equal(logits(loaded(folder), tokens()), logits(theirs, tokens()))


def test_with_gelu_new_the_logits_differ_by_rounding_alone(folder: Path) -> None:
    """transformers writes that activation's formula out in Python, torch has a kernel; float32 keeps seven digits."""
    theirs = saved(folder)
    expected = logits(theirs, tokens())
    assert (logits(loaded(folder), tokens()) - expected).abs().max() <= 2e-6 * expected.abs().max()
    double = loaded(folder).double()
    with torch.no_grad():  # in float64, where our logits would be rounded to float32 again
        exact = double.transformer(tokens()) @ double.transformer.wte.weight.T
    assert (exact - logits(theirs.double(), tokens())).abs().max() < 1e-13


def test_published_checkpoints_leave_out_a_prefix_and_hold_masks_and_a_tied_head(folder: Path) -> None:
    theirs = saved(folder)
    expected = loaded(folder)

    def published(tensors: dict[str, Any]) -> dict[str, Any]:
        short = {name.removeprefix("transformer."): t for name, t in tensors.items()}
        masks = {f"h.{i}.attn.{n}": torch.ones(1, 1, 16, 16) for i in range(2) for n in ("bias", "masked_bias")}
        return short | masks | {"lm_head.weight": short["wte.weight"].clone()}

    change_weights(folder, published)
    change_config(folder, n_inner=None, scale_attn_weights=None, architectures=["GPT2Model"])
    assert all(torch.equal(a, b) for a, b in zip(loaded(folder).parameters(), expected.parameters(), strict=True))
    assert theirs.config.n_layer == 2


def test_weights_in_several_files_are_read(folder: Path) -> None:
    theirs = saved(folder, activation_function="gelu_pytorch_tanh")
    (folder / "model.safetensors").unlink()
    theirs.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert torch.equal(logits(loaded(folder), tokens()), logits(theirs, tokens()))


def test_the_identity_is_that_of_weights_and_config_at_any_url(folder: Path) -> None:
    saved(folder)
    (folder / "README.md").write_text("of no account")
    fs = fsspec.filesystem("memory")
    fs.makedirs("/weights", exist_ok=True)
    fs.put(f"{folder}/", "/weights/", recursive=True)
    (folder / "README.md").unlink()
    first = read_weights(str(folder), FORM, V37).sha256
    assert read_weights("memory://weights", FORM, V37).sha256 == first
    change_weights(folder, lambda tensors: {n: t + 1 for n, t in tensors.items()})
    assert read_weights(str(folder), FORM, V37).sha256 != first


def test_the_model_may_know_fewer_positions_and_its_embedding_or_theirs_may_be_padded(folder: Path) -> None:
    theirs = saved(folder, activation_function="gelu_pytorch_tanh")
    few = tokens(time=5)
    assert torch.equal(logits(loaded(folder, shape(block_size=5)), few), logits(theirs, few))
    padded = loaded(folder, shape(vocab_multiple=64))
    torch.testing.assert_close(logits(padded, tokens()), logits(theirs, tokens()), rtol=0, atol=1e-5)
    # 37 rows, the last two of them padding that came with the weights.
    there = loaded(folder, shape(vocab_size=35, vocab_multiple=37), Numbers(35))
    assert torch.equal(logits(there, tokens(35)), logits(theirs, tokens(35))[..., :35])


def test_half_precision_becomes_float32(folder: Path) -> None:
    saved(folder)
    change_weights(folder, lambda tensors: {n: t.to(torch.bfloat16) for n, t in tensors.items()})
    assert {p.dtype for p in loaded(folder).parameters()} == {torch.float32}


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled(folder: Path) -> None:
    no_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"anything")


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def index(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        no_weights(folder)
        (folder / "model.safetensors.index.json").write_text(text)

    return write


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: change_config(folder, **fields)


def weights(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    return lambda folder: change_weights(folder, change)


def without(part: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {n: t for n, t in tensors.items() if part not in n}


HEAD = {"lm_head.weight": torch.ones(37, 24)}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "config.json").unlink(),
        text("config.json", "{"),
        text("config.json", "[]"),
        config(model_type="llama"),
        config(model_type=None),
        config(activation_function="relu"),
        config(layer_norm_epsilon=1e-6),
        config(n_inner=48),
        config(n_layer="two"),
        config(n_positions=10**30),
        no_weights,
        pickled,
        truncated,
        index("{}"),
        index('{"weight_map": {"a": "../x"}}'),
        index('{"weight_map": {"a": "x.safetensors"}}'),
        index('{"weight_map": {"a": "x\\u0000.safetensors"}}'),
        weights(without("h.1.mlp")),
        weights(lambda t: t | {"x": torch.ones(1)}),
        weights(lambda t: {n: v.T if "c_fc.weight" in n else v for n, v in t.items()}),
        weights(lambda t: {n: v.int() for n, v in t.items()}),
        weights(lambda t: {n: v * float("nan") if "wpe" in n else v for n, v in t.items()}),
        weights(lambda t: {n: (v * float("nan")).to(torch.float8_e5m2) if "wpe" in n else v for n, v in t.items()}),
        weights(lambda t: t | HEAD),
        text("tokenizer.json", "{"),
        text("tokenizer.json", '{"model": {"vocab": {}}, "added_tokens": 7}'),
        text("tokenizer.json", '{"model": {"vocab": {}}, "added_tokens": [{"content": [1], "id": 2}]}'),
    ],
)
def test_what_is_no_such_folder_is_a_mistake(folder: Path, spoil: Callable[[Path], None], told: Told) -> None:
    saved(folder)
    spoil(folder)
    with pytest.raises(UserError) as mistake:
        loaded(folder)
    assert len(mistake.value.problems) == 1
    told(str(mistake.value), folder)


def test_all_differences_are_listed_with_what_to_set(folder: Path, told: Told) -> None:
    saved(folder)
    with pytest.raises(UserError) as mistake:
        loaded(folder, shape(n_layer=3, n_embd=48, block_size=20, vocab_size=9), Numbers(9))
    told(str(mistake.value), folder)


def test_a_vocabulary_of_the_same_size_with_other_numbers_is_a_mistake(folder: Path) -> None:
    saved(folder, vocab_size=3)
    for name, content in tokenizer_files(Characters("abc").to_json()).items():
        (folder / name).write_text(content)
    loaded(folder, shape(vocab_size=3), Characters("abc"))
    with pytest.raises(UserError, match=r"'c' .*'d' "):
        loaded(folder, shape(vocab_size=3), Characters("abd"))


def test_a_missing_folder_and_a_file_are_mistakes(tmp_path: Path) -> None:
    for place in (tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match=f"model.init_from={place}: "):
            loaded(place, vocabulary=Bytes())
