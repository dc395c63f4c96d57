"""mingpt.model.gpt2: its sizes, its dropout, its loss; no position sees a later one. tests/weights: it is GPT-2."""

import math
from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from mingpt.model.gpt2 import GPT, MLP, Attention, GPTConfig, GPTModel
from mingpt.model.language import IGNORE
from paths_kit import ROOT

SIZES = ROOT / "configs/model"
# (layers, heads, width) as published: Radford et al. 2019; Karpathy's minGPT; Rae et al. 2021 (Gopher), table 1. And of
# the checkpoints on Hugging Face the number of parameters: 50257 tokens, 1024 positions, tied embedding.
PUBLISHED: dict[str, tuple[int, ...]] = {
    "gpt2": (12, 12, 768, 124_439_808),
    "gpt2-medium": (24, 16, 1024, 354_823_168),
    "gpt2-large": (36, 20, 1280, 774_030_080),
    "gpt2-xl": (48, 25, 1600, 1_557_611_200),
    "gopher-44m": (8, 16, 512),
    "gpt-mini": (6, 6, 192),
    "gpt-micro": (4, 4, 128),
    "gpt-nano": (3, 3, 48),
}
TINY = GPTConfig(vocab_size=17, block_size=12, n_layer=2, n_head=2, n_embd=16)


def vivid(config: GPTConfig) -> GPT:
    """A model with large weights everywhere, biases too: at GPT-2's 0.02 most paths hardly show in the logits."""
    torch.manual_seed(0)
    model = GPT(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.4)
    return model


def random_batch(size: int, config: GPTConfig = TINY) -> tuple[Tensor, Tensor]:
    rows = torch.randint(config.vocab_size, (size, config.block_size + 1), generator=torch.Generator().manual_seed(1))
    return rows[:, :-1], rows[:, 1:].clone()


def random_tokens(batch: int, time: int) -> Tensor:
    return torch.randint(TINY.vocab_size, (batch, time), generator=torch.Generator().manual_seed(1))


def test_a_token_changes_the_logits_at_its_position_and_after_and_none_before() -> None:
    model, tokens = vivid(TINY), random_tokens(2, TINY.block_size)
    for changed in range(TINY.block_size):
        other = tokens.clone()
        other[:, changed] = (other[:, changed] + 1) % TINY.vocab_size
        with torch.no_grad():
            # To the bit: an attention weight of 1e-9 on a later token would be a leak too.
            same = [
                torch.equal(a, b) for a, b in zip(*(model.logits(x).unbind(1) for x in (tokens, other)), strict=True)
            ]
        assert same == [True] * changed + [False] * (TINY.block_size - changed)


@pytest.mark.parametrize("name", sorted(path.stem for path in SIZES.glob("g*.yaml")))
def test_each_size_has_its_published_shape_and_parameter_count(name: str) -> None:
    values = GPTModel.model_validate(OmegaConf.to_container(OmegaConf.load(SIZES / f"{name}.yaml")))
    assert (values.n_layer, values.n_head, values.n_embd) == PUBLISHED[name][:3]
    with torch.device("meta"):  # shapes without memory: gpt2-xl alone would be 6 GB
        model = GPT(replace(values.shape(vocab_size=50257), block_size=1024, vocab_multiple=1))
    layers, _, width, *number = PUBLISHED[name]
    blocks = 12 * layers * width**2 + 13 * layers * width  # attention 4C²+4C, MLP 8C²+5C, norms 4C
    assert [sum(p.numel() for p in model.parameters())] == (number or [blocks + 2 * width + (50257 + 1024) * width])


def test_weights_start_with_gpt2s_deviations() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=200, block_size=100, n_layer=8, n_head=4, n_embd=128))
    for name, p in model.named_parameters():
        if name.endswith(".bias"):
            assert torch.equal(p, torch.zeros_like(p)), name
        elif "ln_" in name:
            assert torch.equal(p, torch.ones_like(p)), name
        else:
            residual = name.endswith(("attn.c_proj.weight", "mlp.c_proj.weight"))
            expected = 0.02 / math.sqrt(2 * 8) if residual else 0.02
            # 12,800 draws at least: the deviation of a sample is within 3 % (5 sigma)
            assert p.std().item() == pytest.approx(expected, rel=0.03), name
            assert abs(p.mean().item()) < expected / 20, name


DROPPING = GPTConfig(vocab_size=17, block_size=12, n_layer=2, n_head=2, n_embd=16, dropout=0.5)


def test_the_seed_before_a_forward_decides_its_dropout_and_in_eval_mode_there_is_none() -> None:
    tokens = random_tokens(2, 12)

    def losses(model: GPT) -> list[float]:
        found = list[float]()
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(float(model(tokens, tokens)[0]))
        return found

    first, again, other = losses(vivid(DROPPING).train())
    assert first == again != other
    assert losses(vivid(DROPPING)) == losses(vivid(TINY))


def test_dropout_is_on_the_embeddings_the_attention_weights_and_both_residual_branches() -> None:
    def all_ones(module: Attention | MLP) -> None:
        """Make the module's output 1 everywhere without dropout, whatever its input."""
        with torch.no_grad():
            for p in module.parameters():
                p.zero_()
            if isinstance(module, Attention):
                module.c_attn.bias.fill_(1)
                module.c_proj.weight.copy_(torch.eye(DROPPING.n_embd))
            else:
                module.c_proj.bias.fill_(1)

    torch.manual_seed(0)
    model, x = GPT(DROPPING), torch.ones(50, 1, DROPPING.n_embd)
    attention, mlp = model.transformer.h[0].attn, model.transformer.h[0].mlp
    assert isinstance(attention, Attention)
    assert isinstance(mlp, MLP)
    all_ones(attention)
    all_ones(mlp)
    # What a dropout of 0.5 keeps, it doubles: one on the MLP's branch; on attention's, one on the weights and one more.
    assert set(mlp(x).flatten().tolist()) == {0.0, 2.0}
    assert set(attention(x).flatten().tolist()) == {0.0, 4.0}
    entered: list[Tensor] = []
    model.transformer.h[0].register_forward_pre_hook(lambda _module, inputs: entered.append(inputs[0]))
    with torch.no_grad():
        model.transformer.wte.weight.fill_(1)
        model.transformer.wpe.weight.fill_(2)
        model.transformer(random_tokens(4, 12))
    assert set(entered[0].flatten().tolist()) == {0.0, 6.0}


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
    targets[0, 1:] = targets[1:3] = targets[5, 9:] = IGNORE
    with torch.no_grad():
        whole, *halves = (torch.stack(model(tokens[rows], targets[rows])) for rows in (slice(8), slice(4), slice(4, 8)))
    assert [float(x[1]) for x in (whole, *halves)] == [58, 13, 45]
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
