"""The GPT as it learns: its loss, masks and padding; it learns what is there, and nothing where nothing is."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.language import IGNORE

TINY = GPTConfig(vocab_size=16, block_size=16, n_layer=2, n_head=2, n_embd=32)


def random_batch(size: int, generator: torch.Generator, config: GPTConfig = TINY) -> tuple[Tensor, Tensor]:
    rows = torch.randint(config.vocab_size, (size, config.block_size + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def mean_loss(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    loss, count = model(tokens, targets)
    return torch.as_tensor(loss / count)


def vivid(config: GPTConfig) -> GPT:
    """A model whose logits are far apart; at the start they are all near 0, and most mistakes hide there."""
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.4)
    return model


@pytest.mark.parametrize("vocab_size", [2, 65, 1000, 5000])
def test_the_loss_at_the_start_is_near_that_of_guessing(vocab_size: int) -> None:
    config = GPTConfig(vocab_size=vocab_size, block_size=32, n_layer=4, n_head=4, n_embd=64)
    torch.manual_seed(0)
    batch = random_batch(16, torch.Generator().manual_seed(1), config)
    with torch.no_grad():
        assert mean_loss(GPT(config), *batch).item() == pytest.approx(math.log(vocab_size), abs=0.15)


def test_one_batch_is_learned_by_heart() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = random_batch(4, torch.Generator().manual_seed(1))
    for _ in range(250):
        optimizer.zero_grad()
        mean_loss(model, *batch).backward()
        optimizer.step()
    with torch.no_grad():
        assert mean_loss(model, *batch).item() < 0.1


def test_nothing_is_learned_where_there_is_nothing_to_learn() -> None:
    """Fresh random tokens: whoever gets below their entropy has seen the answer (a leaky mask, unshifted targets)."""
    torch.manual_seed(0)
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    fresh, entropy = torch.Generator().manual_seed(1), math.log(TINY.vocab_size)
    for step in range(1, 401):
        optimizer.zero_grad()
        mean_loss(model, *random_batch(16, fresh)).backward()
        optimizer.step()
        if step % 100 == 0:
            with torch.no_grad():
                loss = mean_loss(model, *random_batch(256, fresh)).item()
            assert entropy - 0.02 < loss < entropy + 0.1, step


def test_loss_and_count_leave_out_ignored_targets() -> None:
    model = vivid(TINY)
    tokens, targets = random_batch(3, torch.Generator().manual_seed(1))
    ignored = torch.rand(targets.shape, generator=torch.Generator().manual_seed(2)) < 0.4
    targets = targets.masked_fill(ignored, IGNORE)
    with torch.no_grad():
        loss, count = model(tokens, targets)
        chances = model.logits(tokens).double().log_softmax(-1)
    by_hand = [
        -chances[b, t, int(targets[b, t])].item()
        for b in range(targets.shape[0])
        for t in range(targets.shape[1])
        if not ignored[b, t]
    ]
    assert count.item() == len(by_hand) < targets.numel()
    assert loss.item() == pytest.approx(sum(by_hand), rel=1e-5)
    assert (loss.dtype, count.dtype) == (torch.float32, torch.float32)
    assert (loss.shape, count.shape) == ((), ())


def test_weights_of_one_count_like_none_and_others_scale_each_target() -> None:
    model = vivid(TINY)
    tokens, targets = random_batch(3, torch.Generator().manual_seed(1))
    targets = targets.clone()
    targets[0, 3:] = IGNORE
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(2)) * 2
    with torch.no_grad():
        loss, count = model(tokens, targets)
        ones = model(tokens, targets, torch.ones(targets.shape))
        weighted_loss, weighted_count = model(tokens, targets, weights)
        chances = model.logits(tokens).double().log_softmax(-1)
    counts = targets != IGNORE
    losses = -chances.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    assert ones[0].item() == pytest.approx(loss.item(), rel=1e-6)
    assert ones[1].item() == count.item()
    assert weighted_loss.item() == pytest.approx((losses * weights)[counts].sum().item(), rel=1e-5)
    assert weighted_count.item() == pytest.approx(weights[counts].double().sum().item(), rel=1e-6)
    assert (weighted_loss.dtype, weighted_count.dtype) == (torch.float32, torch.float32)
    assert (weighted_loss.shape, weighted_count.shape) == ((), ())


def test_figures_of_unevenly_masked_halves_add_up_to_those_of_the_whole() -> None:
    model = vivid(TINY)
    tokens, targets = random_batch(8, torch.Generator().manual_seed(1))
    targets = targets.clone()
    targets[0, 1:] = targets[1:3] = targets[5, 9:] = IGNORE  # 17 of the first half's 64 count, 57 of the second's
    with torch.no_grad():
        whole_loss, whole_count = model(tokens, targets)
        (loss_1, count_1), (loss_2, count_2) = model(tokens[:4], targets[:4]), model(tokens[4:], targets[4:])
    assert (count_1.item(), count_2.item(), whole_count.item()) == (17, 57, 74)
    assert (loss_1 + loss_2).item() == pytest.approx(whole_loss.item(), rel=1e-6)
    mean_of_means = (loss_1 / count_1 + loss_2 / count_2) / 2
    assert abs(mean_of_means - whole_loss / whole_count) > 0.01  # what sums are for


def test_a_batch_in_which_nothing_counts_has_no_loss_and_no_gradient() -> None:
    model = vivid(TINY)
    tokens, targets = random_batch(2, torch.Generator().manual_seed(1))
    loss, count = model(tokens, torch.full_like(targets, IGNORE))
    loss.backward()
    assert (loss.item(), count.item()) == (0, 0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_logits_and_sums_are_float32_under_bf16_autocast() -> None:
    """A sum of thousands of losses would lose its last two digits in bf16."""
    model = vivid(TINY)
    tokens, targets = random_batch(8, torch.Generator().manual_seed(1))
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


@pytest.mark.parametrize(
    ("vocab_size", "multiple", "rows"), [(17, 64, 64), (64, 64, 64), (65, 64, 128), (50257, 64, 50304), (17, 1, 17)]
)
def test_the_embedding_is_padded_up_to_the_multiple(vocab_size: int, multiple: int, rows: int) -> None:
    config = GPTConfig(vocab_size, block_size=4, n_layer=1, n_head=1, n_embd=2, vocab_multiple=multiple)
    with torch.device("meta"):
        model = GPT(config)
    assert model.transformer.wte.weight.shape == (rows, 2)


def test_padding_rows_change_neither_loss_nor_gradient_and_get_none() -> None:
    padded = vivid(PADDED)
    bare = GPT(GPTConfig(vocab_size=17, block_size=16, n_layer=2, n_head=2, n_embd=32))
    weights = padded.state_dict()
    bare.load_state_dict(weights | {"transformer.wte.weight": weights["transformer.wte.weight"][:17]})
    batch = random_batch(4, torch.Generator().manual_seed(1), PADDED)
    losses = []
    for model in (padded, bare):
        loss, _ = model(*batch)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    gradients = {name: p.grad for name, p in padded.named_parameters()}
    for name, p in bare.named_parameters():
        ours, theirs = gradients[name], p.grad
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours[:17] if name.endswith("wte.weight") else ours, theirs, rtol=1e-4, atol=1e-5)
    of_embedding = gradients["transformer.wte.weight"]
    assert of_embedding is not None
    assert torch.equal(of_embedding[17:], torch.zeros(64 - 17, 32))
    assert of_embedding[:17].ne(0).any(-1).all()


def test_logits_have_no_column_for_the_padding() -> None:
    model = vivid(PADDED)
    tokens, _ = random_batch(2, torch.Generator().manual_seed(1), PADDED)
    with torch.no_grad():
        logits = model.logits(tokens)
        activations = model.transformer(tokens)
    assert logits.shape == (2, 16, 17)
    expected = F.linear(activations, model.transformer.wte.weight[:17])
    torch.testing.assert_close(logits, expected)
