"""Generation on a GPU, without one: on torch's device `meta`, whose tensors hold no numbers and mix with no others."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mingpt.commands.generate import Text, grow
from mingpt.model import sampling
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.language import LanguageModel
from mingpt.model.modern import Modern, ModernConfig
from mingpt.model.sampling import running_sum, sample

SHAPE: dict[str, Any] = {"vocab_size": 17, "block_size": 8, "n_layer": 1, "n_head": 2, "n_embd": 16}
MODERN: dict[str, Any] = {"n_kv_head": 1, "head_dim": 8, "n_inner": 32, "rope_base": 1e4, "norm_eps": 1e-6}


class Recorded(TorchDispatchMode):
    """The names of all operations on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_meta:
            self.names.add(func._schema.name)
        return out


@pytest.fixture
def device() -> Iterator[Recorded]:
    with Recorded() as recorded:
        yield recorded


@pytest.mark.parametrize(
    "make",
    [lambda: GPT(GPTConfig(**SHAPE)), lambda: Modern(ModernConfig(**SHAPE, **MODERN, qk_norm=True, tied=True))],
    ids=["gpt2", "modern"],
)
def test_texts_grow_where_the_model_is(
    make: Callable[[], LanguageModel], device: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "finite", lambda logits: logits)  # it reads the logits, on purpose
    rows = list[Tensor]()
    stream = sampling.generate_stream

    def spied(model: LanguageModel, tokens: Tensor, *rest: Any, **options: Any) -> Iterator[Any]:
        for column in stream(model, tokens, *rest, **options):
            rows.append(column)
            yield SimpleNamespace(tolist=lambda: [1] * len(tokens))

    monkeypatch.setattr("mingpt.commands.generate.generate_stream", spied)
    options = argparse.Namespace(tokens=12, temperature=0.8, top_k=5, top_p=0.9, seed=1)
    texts = [Text(prompt, number, [*prompt]) for number, prompt in enumerate(([1, 2], [3]))]
    with torch.device("meta"):
        model = make()
    for _ in grow(model, texts, options):
        pass
    assert {row.device.type for row in rows} == {"meta"}
    assert [len(text.tokens) for text in texts] == [14, 13]
    assert "aten::softmax" in device.names or "aten::_softmax" in device.names
    assert "aten::cumsum" not in device.names  # raises in torch's deterministic mode


def test_a_gpu_would_choose_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two sums differ in their last bits: of 4,000 draws none falls between them."""
    logits = torch.randn(4000, 300, generator=torch.Generator().manual_seed(1))
    draws = torch.rand(4000, 1, generator=torch.Generator().manual_seed(2))
    ways: Sequence[tuple[int | None, float | None]] = [(None, None), (20, None), (None, 0.9)]
    before = [sample(logits, draws, 0.8, *way) for way in ways]
    monkeypatch.setattr(Tensor, "cumsum", lambda x, dim: running_sum(x))
    assert all(torch.equal(a, sample(logits, draws, 0.8, *way)) for a, way in zip(before, ways, strict=True))
