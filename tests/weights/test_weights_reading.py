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


def test_any_url_will_do(folder: Path) -> None:
    saved(folder)
    with fsspec.open("memory://weights/config.json", "wb"):
        pass
    fs = fsspec.filesystem("memory")
    fs.put(f"{folder}/", "/weights/", recursive=True)
    assert read_weights("memory://weights", FORM, V37).sha256 == read_weights(str(folder), FORM, V37).sha256


def test_the_model_may_know_fewer_positions(folder: Path) -> None:
    theirs = saved(folder, activation_function="gelu_pytorch_tanh")
    few = tokens(time=5)
    assert torch.equal(logits(loaded(folder, shape(block_size=5)), few), logits(theirs, few))


def test_the_embedding_may_be_padded_here_or_there(folder: Path) -> None:
    theirs = saved(folder, activation_function="gelu_pytorch_tanh")
    padded = loaded(folder, shape(vocab_multiple=64))
    assert len(padded.transformer.wte.weight) == 64
    assert torch.allclose(logits(padded, tokens()), logits(theirs, tokens()), rtol=0, atol=1e-5)
    assert logits(padded, tokens()).shape == logits(theirs, tokens()).shape
    # 37 rows, the last two of them padding that came with the weights.
    there = loaded(folder, shape(vocab_size=35, vocab_multiple=37), Numbers(35))
    assert torch.equal(logits(there, tokens(35)), logits(theirs, tokens(35))[..., :35])


def test_half_precision_becomes_float32(folder: Path) -> None:
    saved(folder)
    change_weights(folder, lambda tensors: {n: t.to(torch.bfloat16) for n, t in tensors.items()})
    assert {p.dtype for p in loaded(folder).parameters()} == {torch.float32}


def test_the_identity_is_that_of_weights_and_config(folder: Path) -> None:
    saved(folder)
    first = read_weights(str(folder), FORM, V37).sha256
    (folder / "README.md").write_text("of no account")
    assert read_weights(str(folder), FORM, V37).sha256 == first
    change_weights(folder, lambda tensors: {n: t + 1 for n, t in tensors.items()})
    assert read_weights(str(folder), FORM, V37).sha256 != first


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
NOT_DESCRIBED = "the file does not hold the weights that config.json describes: "
OTHER = "weights of another architecture"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "there is no config.json: give a folder in"),
        (text("config.json", "{"), "config.json is not JSON"),
        (text("config.json", "[]"), "config.json is not a JSON object"),
        (config(model_type="llama"), rf"{OTHER} \(config.json: model_type='llama'\): take those of a GPT-2"),
        (config(model_type=None), rf"{OTHER} \(config.json: model_type=None\)"),
        (config(activation_function="relu"), f"{OTHER}: config.json says activation_function='relu', GPT-2 has"),
        (config(layer_norm_epsilon=1e-6), f"{OTHER}: config.json says layer_norm_epsilon=1e-06, GPT-2 has 1e-05"),
        (config(n_inner=48), f"{OTHER}: config.json says n_inner=48, not 4 x n_embd"),
        (config(n_layer="two"), "config.json says n_layer='two': give whole numbers"),
        (no_weights, "there is no model.safetensors and no model.safetensors.index.json"),
        (pickled, "there is no model.safetensors, and pytorch_model.bin is never read.* pickle .*save_pretrained"),
        (truncated, "model.safetensors is damaged, or not a safetensors file"),
        (text("model.safetensors", "hello"), "model.safetensors is damaged, or not a safetensors file"),
        (index("{}"), ".*has no weight_map"),
        (index('{"weight_map": {"a": "../x"}}'), ".*has no weight_map from tensors to files of this folder"),
        (index('{"weight_map": {"a": "x.safetensors"}}'), ".*names x.safetensors, which is missing: copy the whole"),
        (weights(without("h.1.mlp")), rf'{NOT_DESCRIBED}.*Missing key.*: "transformer\.h\.1\.mlp\.c_fc'),
        (weights(lambda t: t | {"x": torch.ones(1)}), rf'{NOT_DESCRIBED}.*Unexpected key.*: "transformer\.x"'),
        (
            weights(lambda t: {n: v.T if "c_fc.weight" in n else v for n, v in t.items()}),
            rf"{NOT_DESCRIBED}.*size mismatch for transformer\.h\.0\.mlp\.c_fc\.weight: .*\[96, 24\].*\[24, 96\]",
        ),
        (weights(lambda t: {n: v.int() for n, v in t.items()}), ".*transformer\\.wte\\.weight"),
        (weights(lambda t: {n: v * float("nan") if "wpe" in n else v for n, v in t.items()}),
         "tensors that do not hold finite floating-point numbers: transformer.wpe.weight$"),
        (weights(lambda t: {n: (v * float("nan")).to(torch.float8_e5m2) if "wpe" in n else v for n, v in t.items()}),
         "tensors that do not hold finite floating-point numbers: transformer.wpe.weight$"),
        (weights(lambda t: t | HEAD), "lm_head.weight is not transformer.wte.weight"),
        (text("tokenizer.json", "{"), "tokenizer.json is damaged"),
        (text("tokenizer.json", '{"model": {"vocab": {}}, "added_tokens": 7}'), "tokenizer.json is damaged"),
        (text("tokenizer.json", '{"model": {"vocab": {}}, "added_tokens": [{"content": [1], "id": 2}]}'),
         "tokenizer.json is damaged"),
        (config(n_positions=10**30), f"config.json says n_positions={10**30}: give whole numbers from 1 to 2147483647"),
        (index('{"weight_map": {"a": "x\\u0000.safetensors"}}'), ".*has no weight_map from tensors to files of this"),
    ],
)  # fmt: skip
def test_what_is_no_such_folder_is_a_mistake(folder: Path, spoil: Callable[[Path], None], message: str) -> None:
    saved(folder)
    spoil(folder)
    with pytest.raises(UserError, match=f"^model.init_from={folder}: {message}") as mistake:
        loaded(folder)
    assert len(mistake.value.problems) == 1


def test_all_differences_are_listed_with_what_to_set(folder: Path) -> None:
    saved(folder)
    with pytest.raises(UserError) as mistake:
        loaded(folder, shape(n_layer=3, n_embd=48, block_size=20, vocab_size=9), Numbers(9))
    assert [p.removeprefix(f"model.init_from={folder}: ") for p in mistake.value.problems] == [
        "the weights have n_layer 2, the model has n_layer 3: set model.n_layer=2",
        "the weights have n_embd 24, the model has n_embd 48: set model.n_embd=24",
        "the weights have 16 positions, and model.block_size=20: set model.block_size=16 or less",
        "the weights are for 37 tokens, and the data's vocabulary has 9: take data in the tokens that the weights were "
        "trained with; if those above the vocabulary are padding, set model.vocab_multiple=37",
    ]


def test_a_vocabulary_of_the_same_size_with_other_numbers_is_a_mistake(folder: Path) -> None:
    saved(folder, vocab_size=3)
    for name, content in tokenizer_files(Characters("abc").to_json()).items():
        (folder / name).write_text(content)
    loaded(folder, shape(vocab_size=3), Characters("abc"))
    with pytest.raises(UserError, match=r"2 tokens have other numbers .*: 'c' \(2, None\), 'd' \(None, 2\): take data"):
        loaded(folder, shape(vocab_size=3), Characters("abd"))


def test_a_missing_folder_and_a_file_are_mistakes(tmp_path: Path) -> None:
    for place in (tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match=f"model.init_from={place}: there is no config.json"):
            loaded(place, vocabulary=Bytes())
