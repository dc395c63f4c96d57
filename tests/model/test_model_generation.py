"""generate: the seed decides. generate_stream: what is kept changes no logits, and other rows change no row."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from mingpt.model import sampling
from mingpt.model.language import LanguageModel
from mingpt.model.sampling import generate, generate_stream, running_sum, sample
from tests.kits.model_kit import BLOCK, KINDS, PADDED, WORDS, random_tokens, small

PROMPT = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    """In float64: there rounding is too small to hide a mistake."""
    return small(request.param).double()


def streamed(model: LanguageModel, tokens: Tensor, count: int, **options: Any) -> Tensor:
    return torch.stack(list(generate_stream(model, tokens, count, **options)), 1)


@pytest.mark.parametrize("prompt", [1, 5, BLOCK, 20])
def test_cached_or_not_the_same_is_generated_also_when_the_window_slides(model: LanguageModel, prompt: int) -> None:
    tokens = random_tokens(3, prompt)
    kept = streamed(model, tokens, 3 * BLOCK, seed=3)
    assert torch.equal(kept, streamed(model, tokens, 3 * BLOCK, seed=3, cached=False))


@pytest.mark.parametrize("lengths", [(4, 4, 4), (1, 6, 3), (2, BLOCK, 5)])
def test_prompts_of_different_lengths_are_continued_as_each_alone(model: LanguageModel, lengths: Sequence[int]) -> None:
    prompts, count = random_tokens(3, max(lengths)), 2 * BLOCK
    together = streamed(model, prompts, count, lengths=lengths, seed=5)
    start = min(lengths)
    for row, length in enumerate(lengths):  # its number decides what is drawn, not its place
        alone = streamed(model, prompts[row : row + 1, :length], count, seed=5, numbers=[row])
        assert torch.equal(together[row, length - start :][:count], alone[0])
        assert torch.equal(together[row, : length - start], prompts[row, start:length])


def test_a_sample_begins_as_a_shorter_one_and_each_is_another(model: LanguageModel) -> None:
    prompts = random_tokens(1, 4).expand(10, -1)
    ten = streamed(model, prompts, 40, seed=7)
    assert torch.equal(streamed(model, prompts, 16, seed=7), ten[:, :16])
    everything = torch.cat([ten, streamed(model, prompts, 40, seed=8)]).tolist()
    assert len({tuple(row) for row in everything}) == 20


@pytest.mark.parametrize("training", [True, False])
def test_a_stream_that_is_left_leaves_the_model_as_it_was(model: LanguageModel, training: bool) -> None:
    """While it goes on, there is no dropout, and no gradient is recorded."""
    model = deepcopy(model).train(training)
    recorded = list[bool]()
    model.blocks()[-1].register_forward_hook(lambda _module, _inputs, output: recorded.append(output.requires_grad))
    stream = generate_stream(model, random_tokens(1, 2), 20)
    next(stream)
    assert (model.training, recorded) == (False, [False])
    stream.close()  # type: ignore[attr-defined]
    assert {m.training for m in model.modules()} == {training}


CHANCES = torch.tensor([[0.1, 0.4, 0.0, 0.3, 0.2]]).log()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"top_k": 2, "top_p": 0.6}, [1, 3]),  # of 0.4 and 0.3, the first has a share of 0.57
        ({"temperature": 0.0}, [1]),
    ],
)
def test_top_p_keeps_the_fewest_likeliest_that_reach_it(options: dict[str, float], kept: list[int]) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "top_k": None, "top_p": None} | options
    out = sample(CHANCES.expand(1000, -1), torch.arange(1000.0)[:, None] / 1000, **settings).tolist()
    assert sorted(set(out)) == kept
    total = CHANCES.exp()[0, kept].sum().item()
    for token in kept:  # among themselves they keep their shares
        assert out.count(token) / 1000 == pytest.approx(CHANCES[0, token].exp().item() / total, abs=2e-3)


def test_temperature_0_takes_the_likeliest_token_whatever_the_seed(model: LanguageModel) -> None:
    tokens = PROMPT
    for _ in range(20):
        tokens = torch.cat([tokens, model.logits(tokens[:, -BLOCK:])[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(generate(model, PROMPT, 20, temperature=0, seed=2), tokens)
    assert not torch.equal(generate(model, PROMPT, 20, temperature=1), tokens)  # there was a choice


@pytest.mark.parametrize("top_k", [None, WORDS, PADDED])
def test_every_token_can_be_drawn_and_the_padding_never(model: LanguageModel, top_k: int | None) -> None:
    # As good as uniform: were the 47 padding rows in the draw, they would be most of it.
    out = generate(model, PROMPT, 300, temperature=1e6, top_k=top_k, seed=1)
    assert set(out[:, 4:].flatten().tolist()) == set(range(WORDS))


# --- on a GPU, without one: on torch's device `meta`, whose tensors hold no numbers and mix with no others ---


def test_texts_grow_where_the_model_is(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "finite", lambda logits: logits)  # it reads the logits, on purpose
    monkeypatch.setattr(Tensor, "cumsum", None)  # raises in torch's deterministic mode
    there = deepcopy(model).to("meta")
    tokens = torch.zeros(2, 2, dtype=torch.int64, device="meta")
    new = list(generate_stream(there, tokens, 12, lengths=(2, 1), temperature=0.8, top_k=5, top_p=0.9))
    assert [column.device.type for column in new] == ["meta"] * 13


def test_a_gpu_would_choose_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two sums differ in their last bits: of 4,000 draws none falls between them."""
    logits = torch.randn(4000, 300, generator=torch.Generator().manual_seed(1))
    draws = torch.rand(4000, 1, generator=torch.Generator().manual_seed(2))
    before = sample(logits, draws, 0.8, None, 0.9)
    monkeypatch.setattr(Tensor, "cumsum", lambda x, dim: running_sum(x))
    assert torch.equal(before, sample(logits, draws, 0.8, None, 0.9))
