"""mingpt.model.gpt2: it is GPT-2, to the parameter, and no position sees a later one."""

import math
from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import functional as F

from mingpt.model.gpt2 import GPT, MLP, Attention, GPTConfig
from mingpt.model.kinds.gpt import GPTModel
from paths_kit import ROOT

SIZES = ROOT / "configs/model"
# (layers, heads, width) as published: Radford et al. 2019; Karpathy's minGPT; Rae et al. 2021 (Gopher), table 1.
PUBLISHED_SHAPES = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
    "gopher-44m": (8, 16, 512),
    "gpt-mini": (6, 6, 192),
    "gpt-micro": (4, 4, 128),
    "gpt-nano": (3, 3, 48),
}
# Of the checkpoints on Hugging Face: 50257 tokens, 1024 positions, tied embedding.
PUBLISHED_COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}
TINY = GPTConfig(vocab_size=17, block_size=12, n_layer=2, n_head=2, n_embd=16)


def count(model: GPT) -> int:
    return sum(p.numel() for p in model.parameters())


def vivid(config: GPTConfig) -> GPT:
    """A model with large weights everywhere, biases too: at GPT-2's 0.02 most paths hardly show in the logits."""
    torch.manual_seed(0)
    model = GPT(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.4)
    return model


def random_tokens(batch: int, time: int) -> Tensor:
    return torch.randint(TINY.vocab_size, (batch, time), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("changed", range(TINY.block_size))
def test_a_token_changes_the_logits_at_its_position_and_after_and_none_before(changed: int) -> None:
    model, tokens = vivid(TINY), random_tokens(2, TINY.block_size)
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % TINY.vocab_size
    with torch.no_grad():
        before, after = model.logits(tokens), model.logits(other)
    # To the bit: an attention weight of 1e-9 on a later token would be a leak too.
    assert torch.equal(before[:, :changed], after[:, :changed])
    for position in range(changed, TINY.block_size):
        assert not torch.equal(before[:, position], after[:, position]), position


@pytest.mark.parametrize("position", range(TINY.block_size))
def test_the_gradient_of_a_position_reaches_exactly_the_embeddings_up_to_it(position: int) -> None:
    model = vivid(TINY)
    seen: list[Tensor] = []
    model.transformer.wte.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    logits = model.logits(random_tokens(1, TINY.block_size))
    # log-softmax, since the plain sum of a position's logits could hide a path by cancelling
    (gradient,) = torch.autograd.grad(logits[0, position].log_softmax(-1)[0], seen[0])
    reached = gradient[0].ne(0).any(-1).tolist()
    assert reached == [t <= position for t in range(TINY.block_size)]


def test_every_size_in_configs_is_one_of_the_published() -> None:
    assert {path.stem for path in SIZES.glob("g*.yaml")} == {*PUBLISHED_SHAPES}


@pytest.mark.parametrize("name", PUBLISHED_SHAPES)
def test_each_size_has_its_published_shape_and_parameter_count(name: str) -> None:
    values = GPTModel.model_validate(OmegaConf.to_container(OmegaConf.load(SIZES / f"{name}.yaml")))
    assert (values.n_layer, values.n_head, values.n_embd) == PUBLISHED_SHAPES[name]
    shape = replace(values.shape(vocab_size=50257), block_size=1024, vocab_multiple=1)
    with torch.device("meta"):  # shapes without memory: gpt2-xl alone would be 6 GB
        model = GPT(shape)
    layers, _, width = PUBLISHED_SHAPES[name]
    blocks = 12 * layers * width**2 + 13 * layers * width  # attention 4C²+4C, MLP 8C²+5C, norms 4C
    closed_form = blocks + 2 * width + (50257 + 1024) * width
    assert count(model) == PUBLISHED_COUNTS.get(name, closed_form)


def test_parameters_have_the_names_and_shapes_of_hugging_faces_gpt2() -> None:
    v, t, c = 17, 12, 16
    expected: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (v, c),
        "transformer.wpe.weight": (t, c),
        "transformer.ln_f.weight": (c,),
        "transformer.ln_f.bias": (c,),
    }
    for i in range(2):
        expected |= {
            f"transformer.h.{i}.ln_1.weight": (c,),
            f"transformer.h.{i}.ln_1.bias": (c,),
            f"transformer.h.{i}.attn.c_attn.weight": (c, 3 * c),
            f"transformer.h.{i}.attn.c_attn.bias": (3 * c,),
            f"transformer.h.{i}.attn.c_proj.weight": (c, c),
            f"transformer.h.{i}.attn.c_proj.bias": (c,),
            f"transformer.h.{i}.ln_2.weight": (c,),
            f"transformer.h.{i}.ln_2.bias": (c,),
            f"transformer.h.{i}.mlp.c_fc.weight": (c, 4 * c),
            f"transformer.h.{i}.mlp.c_fc.bias": (4 * c,),
            f"transformer.h.{i}.mlp.c_proj.weight": (4 * c, c),
            f"transformer.h.{i}.mlp.c_proj.bias": (c,),
        }
    model = GPT(TINY)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == expected
    # and nothing else in the file: a mask or position buffer there would be an unexpected key to a reader
    assert set(model.state_dict()) == set(expected)


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


def reference_logits(model: GPT, tokens: Tensor) -> Tensor:
    """GPT-2 written out, head by head and in float64, from the parameters alone."""
    p = {name.removeprefix("transformer."): v.detach().double() for name, v in model.named_parameters()}
    time, width, head = tokens.shape[1], model.config.n_embd, model.config.n_embd // model.config.n_head

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        return centred / (variance + 1e-5).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]

    def affine(x: Tensor, name: str) -> Tensor:
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    x = p["wte.weight"][tokens] + p["wpe.weight"][:time]
    later = torch.ones(time, time, dtype=torch.bool).triu(1)
    for i in range(model.config.n_layer):
        q, k, v = affine(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(width, -1)
        heads = []
        for at in range(0, width, head):
            s = slice(at, at + head)
            scores = q[..., s] @ k[..., s].transpose(1, 2) / math.sqrt(head)
            heads.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[..., s])
        x = x + affine(torch.cat(heads, -1), f"h.{i}.attn.c_proj")
        x = x + affine(gelu_tanh(affine(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")), f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ p["wte.weight"].T


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("time", [1, 7, 12])
def test_logits_are_those_of_gpt2_written_out(time: int) -> None:
    model, tokens = vivid(TINY), random_tokens(3, time)
    with torch.no_grad():
        logits = model.double().logits(tokens)
    expected = reference_logits(model, tokens)
    assert logits.shape == (3, time, TINY.vocab_size)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_mlp_uses_the_tanh_form_of_gelu() -> None:
    torch.manual_seed(0)
    mlp = MLP(TINY).double().eval()
    with torch.no_grad():
        for p in mlp.parameters():
            p.normal_()
        x = torch.randn(5, TINY.n_embd, dtype=torch.float64)
        hidden = x @ mlp.c_fc.weight + mlp.c_fc.bias
        expected = gelu_tanh(hidden) @ mlp.c_proj.weight + mlp.c_proj.bias
        with_erf = F.gelu(hidden) @ mlp.c_proj.weight + mlp.c_proj.bias
        torch.testing.assert_close(mlp(x), expected, rtol=0, atol=1e-12)
        assert (with_erf - expected).abs().max() > 1e-4  # so the line above tells the two forms apart


DROPPING = GPTConfig(vocab_size=17, block_size=12, n_layer=2, n_head=2, n_embd=16, dropout=0.5)


def loss_after(seed: int, model: GPT) -> float:
    tokens = random_tokens(2, 12)
    torch.manual_seed(seed)
    loss: Tensor = model(tokens, tokens)[0]
    return loss.item()


def test_the_seed_before_a_forward_decides_its_dropout() -> None:
    model = vivid(DROPPING).train()
    assert loss_after(1, model) == loss_after(1, model)
    assert loss_after(1, model) != loss_after(2, model)


def test_in_eval_mode_there_is_no_dropout() -> None:
    model, without = vivid(DROPPING), vivid(TINY)
    assert loss_after(1, model) == loss_after(2, model) == loss_after(1, without)


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
