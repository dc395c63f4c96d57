"""sampling.generate: the seed decides, the padding never appears, and the model is left as it was."""

import pytest
import torch
from torch import Tensor

from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.sampling import generate

CONFIG = GPTConfig(vocab_size=17, block_size=8, n_layer=2, n_head=2, n_embd=16, vocab_multiple=64)
PROMPT = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])


@pytest.fixture(scope="module")
def model() -> GPT:
    """Weights so large that the next token is neither certain nor anything goes."""
    torch.manual_seed(0)
    model = GPT(CONFIG).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.4)
    return model


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


def test_of_a_context_longer_than_a_block_the_newest_block_is_seen(model: GPT) -> None:
    long = torch.randint(17, (64, 30), generator=torch.Generator().manual_seed(1))
    out = generate(model, long, 10, seed=5)
    assert torch.equal(out[:, :30], long)
    assert torch.equal(out[:, 30:], generate(model, long[:, -8:], 10, seed=5)[:, 8:])
    assert not torch.equal(out[:, 30], generate(model, long[:, -7:], 1, seed=5)[:, 7])  # the eighth is seen too
