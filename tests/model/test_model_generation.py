"""generate: the seed decides. generate_stream: what is kept changes no logits, and other rows change no row."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.language import KVCache
from mingpt.model.sampling import generate, generate_stream, sample

BLOCK = 8
CONFIG = GPTConfig(vocab_size=17, block_size=BLOCK, n_layer=3, n_head=2, n_embd=16, vocab_multiple=64)
PROMPT = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])


def vivid(dtype: torch.dtype = torch.float64) -> GPT:
    """Weights so large that every token matters, in float64: there rounding is too small to hide a mistake."""
    torch.manual_seed(0)
    model = GPT(CONFIG).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.4)
    return model.to(dtype)


@pytest.fixture(scope="module")
def model() -> GPT:
    return vivid()


def random_tokens(batch: int, time: int) -> Tensor:
    return torch.randint(17, (batch, time), generator=torch.Generator().manual_seed(1))


def streamed(model: GPT, tokens: Tensor, count: int, **options: Any) -> Tensor:
    return torch.stack(list(generate_stream(model, tokens, count, **options)), 1)


def logits_of_stream(model: GPT, tokens: Tensor, count: int, **options: Any) -> tuple[Tensor, Tensor]:
    """The new tokens, and the logits that each was chosen from."""
    seen: list[Tensor] = []
    compute = model.padded_logits

    def recorded(activations: Tensor) -> Tensor:
        seen.append(compute(activations))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "padded_logits", recorded)
        new = streamed(model, tokens, count, **options)
    return new, torch.stack(seen, 1)


def assert_same(a: Tensor, b: Tensor) -> None:
    """Equal but for rounding, and not to the bit: a product with one row adds in another order than one with many.

    In float64 that is around 1e-15; logits are given in float32, so what is left is at most their last bit.
    """
    torch.testing.assert_close(a, b, rtol=1.2e-7, atol=1e-12)


@pytest.mark.parametrize("first", range(1, BLOCK + 1))
@pytest.mark.parametrize("batch", [1, 3])
def test_the_logits_of_every_position_are_the_same_with_what_is_kept(model: GPT, first: int, batch: int) -> None:
    tokens = random_tokens(batch, BLOCK)
    past = [KVCache(BLOCK) for _ in range(CONFIG.n_layer)]
    with torch.no_grad():
        whole = model.logits(tokens)
        pieces = [tokens[:, :first], *tokens[:, first:].split(1, 1)]
        kept = torch.cat([model.logits(piece, past) for piece in pieces if piece.numel()], 1)
    assert kept.shape == whole.shape
    assert_same(kept, whole)


@pytest.mark.parametrize("prompt", [1, 5, BLOCK, 20])
@pytest.mark.parametrize("batch", [1, 3])
def test_cached_or_not_the_same_is_generated_also_when_the_window_slides(model: GPT, prompt: int, batch: int) -> None:
    tokens = random_tokens(batch, prompt)
    kept, kept_logits = logits_of_stream(model, tokens, 3 * BLOCK, seed=3)
    anew, anew_logits = logits_of_stream(model, tokens, 3 * BLOCK, seed=3, cached=False)
    assert kept.shape == (batch, 3 * BLOCK)
    assert torch.equal(kept, anew)
    assert_same(kept_logits, anew_logits)


def test_each_position_is_computed_once_until_the_window_slides(model: GPT) -> None:
    computed: list[int] = []
    hook = model.transformer.register_forward_pre_hook(lambda _module, inputs: computed.append(inputs[0].shape[1]))
    streamed(model, random_tokens(2, 3), BLOCK)
    hook.remove()
    assert computed == [3, 1, 1, 1, 1, 1, BLOCK, BLOCK]


@pytest.mark.parametrize("lengths", [(4, 4, 4), (1, 6, 3), (2, BLOCK, 5)])
def test_prompts_of_different_lengths_are_continued_as_each_alone(model: GPT, lengths: Sequence[int]) -> None:
    prompts, count = random_tokens(3, max(lengths)), 2 * BLOCK
    together = streamed(model, prompts, count, lengths=lengths, seed=5)
    start = min(lengths)
    for row, length in enumerate(lengths):
        alone = streamed(model, prompts[row : row + 1, :length], count, seed=5, numbers=[row])
        assert torch.equal(together[row, length - start :][:count], alone[0])
        assert torch.equal(together[row, : length - start], prompts[row, start:length])


def test_a_sample_is_the_same_in_any_batch(model: GPT) -> None:
    prompt = random_tokens(1, 4)

    def texts(rows: list[int], seed: int = 7) -> Tensor:
        return streamed(model, prompt.expand(len(rows), -1), 40, seed=seed, numbers=rows)

    ten = texts([*range(10)])
    for rows in ([0], [9], [3, 1, 4]):
        assert torch.equal(texts(rows), ten[rows])
    everything = torch.cat([ten, texts([*range(10)], seed=8)]).tolist()
    assert len({tuple(row) for row in everything}) == 20  # each another one


def test_a_longer_text_begins_as_a_shorter_one(model: GPT) -> None:
    prompt = random_tokens(3, 4)
    long = streamed(model, prompt, 40, seed=7)
    for count in (1, 2, 7, 16, 33):
        assert torch.equal(streamed(model, prompt, count, seed=7), long[:, :count])


@pytest.mark.parametrize("training", [True, False])
def test_a_stream_that_is_left_leaves_the_model_as_it_was(training: bool) -> None:
    """While it goes on, there is no dropout, and no gradient is recorded."""
    model = GPT(replace(CONFIG, dropout=0.5)).train(training)
    recorded = list[bool]()
    model.transformer.register_forward_hook(lambda _module, _inputs, output: recorded.append(output.requires_grad))
    stream = generate_stream(model, random_tokens(1, 2), 20)
    next(stream)
    assert (model.training, recorded) == (False, [False])
    stream.close()  # type: ignore[attr-defined]
    assert {m.training for m in model.modules()} == {training}


CHANCES = torch.tensor([[0.1, 0.4, 0.0, 0.3, 0.2]]).log()


def chosen(draws: Sequence[float], **options: Any) -> list[int]:
    settings = {"temperature": 1.0, "top_k": None, "top_p": None} | options
    rows = CHANCES.expand(len(draws), -1)
    return sample(rows, torch.tensor(draws)[:, None], **settings).tolist()


def test_each_token_has_its_share_of_the_draws() -> None:
    assert chosen([0.0, 0.09, 0.11, 0.49, 0.51, 0.79, 0.81, 0.9999999]) == [0, 0, 1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_p": 0.01}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"top_p": 0.95}, [0, 1, 3, 4]),
        ({"top_k": 2, "top_p": 0.6}, [1, 3]),  # of 0.4 and 0.3, the first has a share of 0.57
        ({"top_k": 2, "top_p": 0.56}, [1]),
        ({"top_k": 9, "top_p": 1.0}, [0, 1, 3, 4]),
        ({"temperature": 1e-40}, [1]),
        ({"temperature": 0.0}, [1]),
    ],
)
def test_top_p_keeps_the_fewest_likeliest_that_reach_it(options: dict[str, float], kept: list[int]) -> None:
    out = chosen([i / 1000 for i in range(1000)], **options)
    assert sorted(set(out)) == kept
    total = CHANCES.exp()[0, kept].sum().item()
    for token in kept:  # among themselves they keep their shares
        assert out.count(token) / 1000 == pytest.approx(CHANCES[0, token].exp().item() / total, abs=2e-3)


def test_top_p_is_taken_of_what_top_k_leaves() -> None:
    draws = [i / 1000 for i in range(1000)]
    assert set(chosen(draws, top_k=2, top_p=0.6)) == {1, 3}  # of 0.4 and 0.3, the first has a share of 0.57
    assert set(chosen(draws, top_k=2, top_p=0.56)) == {1}
    assert set(chosen(draws, top_k=9, top_p=1.0)) == {0, 1, 3, 4}


def likeliest(model: GPT, tokens: Tensor, count: int) -> Tensor:
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat([tokens, model.logits(tokens[:, -8:])[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens


def test_the_seed_alone_decides_the_tokens(model: GPT) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = generate(model, PROMPT, 40, seed=7)
    assert torch.equal(torch.get_rng_state(), before)  # sampling in the midst of training would change its dropout
    torch.manual_seed(2)
    assert torch.equal(generate(model, PROMPT, 40, seed=7), first)
    assert not torch.equal(generate(model, PROMPT, 40, seed=8), first)


def test_temperature_0_and_top_k_1_take_the_likeliest_token_whatever_the_seed(model: GPT) -> None:
    expected = likeliest(model, PROMPT, 20)
    assert torch.equal(generate(model, PROMPT, 20, temperature=0, seed=2), expected)
    assert torch.equal(generate(model, PROMPT, 20, temperature=50, top_k=1), expected)
    assert not torch.equal(generate(model, PROMPT, 20, temperature=1), expected)  # there was a choice
    assert torch.equal(generate(model, PROMPT, 0), PROMPT)


def test_top_k_leaves_exactly_the_k_likeliest(model: GPT) -> None:
    # At this temperature the three that are left are about equally likely, so each is drawn in 300 tries.
    prompt = PROMPT[:1].expand(300, -1)
    drawn = generate(model, prompt, 1, temperature=1000, top_k=3, seed=1)[:, -1]
    with torch.no_grad():
        best = model.logits(PROMPT[:1])[0, -1].topk(3).indices
    assert set(drawn.tolist()) == set(best.tolist())


@pytest.mark.parametrize("top_k", [None, 17, 64])
def test_every_token_can_be_drawn_and_the_padding_never(model: GPT, top_k: int | None) -> None:
    # As good as uniform: were the 47 padding rows in the draw, they would be most of it.
    out = generate(model, PROMPT, 300, temperature=1e6, top_k=top_k, seed=1)
    assert set(out[:, 4:].flatten().tolist()) == set(range(17))
