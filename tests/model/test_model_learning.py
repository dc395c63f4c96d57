"""The GPT as it learns: its loss, masks and padding; it learns what is there, and nothing where nothing is."""

import math

import pytest
import torch
from torch import Tensor

from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.language import IGNORE

TINY = GPTConfig(vocab_size=16, block_size=16, n_layer=2, n_head=2, n_embd=32)


def random_batch(size: int, config: GPTConfig = TINY) -> tuple[Tensor, Tensor]:
    rows = torch.randint(config.vocab_size, (size, config.block_size + 1), generator=torch.Generator().manual_seed(1))
    return rows[:, :-1], rows[:, 1:].clone()


def vivid(config: GPTConfig) -> GPT:
    """A model whose logits are far apart; at the start they are all near 0, and most mistakes hide there."""
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.4)
    return model


@pytest.mark.parametrize("vocab_size", [2, 65, 5000])
def test_the_loss_at_the_start_is_near_that_of_guessing(vocab_size: int) -> None:
    config = GPTConfig(vocab_size=vocab_size, block_size=32, n_layer=4, n_head=4, n_embd=64)
    torch.manual_seed(0)
    with torch.no_grad():
        loss, count = GPT(config)(*random_batch(16, config))
    assert (loss / count).item() == pytest.approx(math.log(vocab_size), abs=0.15)


def test_each_target_counts_as_its_weight_says_and_ignored_ones_do_not() -> None:
    model = vivid(TINY)
    tokens, targets = random_batch(3)
    targets[0, 3:] = IGNORE
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(2)) * 2
    counts = targets != IGNORE
    with torch.no_grad():
        losses = -model.logits(tokens).double().log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        for given, weight in (([], counts), ([torch.ones(targets.shape)], counts), ([weights], weights * counts)):
            loss, count = model(tokens, targets, *given)
            assert loss.item() == pytest.approx((losses * weight).sum().item(), rel=1e-5)
            assert count.item() == pytest.approx(weight.double().sum().item(), rel=1e-6)
            assert (loss.dtype, count.dtype, loss.shape, count.shape) == (torch.float32, torch.float32, (), ())


def test_figures_of_unevenly_masked_halves_add_up_to_those_of_the_whole() -> None:
    model = vivid(TINY)
    tokens, targets = random_batch(8)
    targets[0, 1:] = targets[1:3] = targets[5, 9:] = IGNORE  # 17 of the first half's 64 count, 57 of the second's
    with torch.no_grad():
        whole, *halves = (torch.stack(model(tokens[rows], targets[rows])) for rows in (slice(8), slice(4), slice(4, 8)))
    assert [float(x[1]) for x in (whole, *halves)] == [74, 17, 57]
    torch.testing.assert_close(halves[0] + halves[1], whole, rtol=1e-6, atol=0)


def test_a_batch_in_which_nothing_counts_has_no_loss_and_no_gradient() -> None:
    model = vivid(TINY)
    tokens, targets = random_batch(2)
    loss, count = model(tokens, torch.full_like(targets, IGNORE))
    loss.backward()
    assert (loss.item(), count.item()) == (0, 0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_logits_and_sums_are_float32_under_bf16_autocast() -> None:
    """A sum of thousands of losses would lose its last two digits in bf16."""
    model = vivid(TINY)
    tokens, targets = random_batch(8)
    exact, _ = model(tokens, targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss, count = model(tokens, targets)
        logits = model.logits(tokens)
    assert (loss.dtype, count.dtype, logits.dtype) == (torch.float32, torch.float32, torch.float32)
    assert loss.item() != exact.item()  # autocast was at work
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)
    # not representable in bf16, so no rounding to it happened on the way
    assert loss.bfloat16().float().item() != loss.item()


PADDED = GPTConfig(vocab_size=17, block_size=16, n_layer=2, n_head=2, n_embd=32, vocab_multiple=64)


@pytest.mark.parametrize(("vocab_size", "multiple", "rows"), [(64, 64, 64), (65, 64, 128), (17, 1, 17)])
def test_the_embedding_is_padded_up_to_the_multiple(vocab_size: int, multiple: int, rows: int) -> None:
    model = GPT(GPTConfig(vocab_size, block_size=4, n_layer=1, n_head=1, n_embd=2, vocab_multiple=multiple))
    assert model.transformer.wte.weight.shape == (rows, 2)
    assert model.logits(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, vocab_size)


def test_padding_rows_change_neither_loss_nor_gradient_and_get_none() -> None:
    padded = vivid(PADDED)
    bare = GPT(GPTConfig(vocab_size=17, block_size=16, n_layer=2, n_head=2, n_embd=32))
    weights = padded.state_dict()
    bare.load_state_dict(weights | {"transformer.wte.weight": weights["transformer.wte.weight"][:17]})
    batch = random_batch(4, PADDED)
    losses = []
    for model in (padded, bare):
        loss, _ = model(*batch)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    of_embedding = padded.transformer.wte.weight.grad
    assert of_embedding is not None
    for ours, theirs in zip(padded.parameters(), bare.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(
            ours.grad[:17] if ours.shape[0] == 64 else ours.grad, theirs.grad, rtol=1e-4, atol=1e-5
        )
    assert torch.equal(of_embedding[17:], torch.zeros(64 - 17, 32))
    assert of_embedding[:17].ne(0).any(-1).all()
