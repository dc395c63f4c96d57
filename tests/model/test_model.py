"""mingpt.model: sizes, first weights, dropout, loss; no position sees a later one. tests/weights: it is GPT-2."""

import pytest
import torch

from mingpt.config.models import Language
from mingpt.model.building import build_language_model
from mingpt.model.language import IGNORE, LanguageModel, positions
from tests.kits.config_kit import configured, problems
from tests.kits.model_kit import BLOCK, KINDS, WORDS, random_tokens, small

# The vocabulary, the number of parameters and the heads of the published weights.
PUBLISHED = {
    "gpt2": (50257, 124_439_808, 12),
    "gpt2-medium": (50257, 354_823_168, 16),
    "gpt2-large": (50257, 774_030_080, 20),
    "gpt2-xl": (50257, 1_557_611_200, 25),
    "modern-135m": (49152, 134_515_008, 9),
    "modern-360m": (49152, 361_821_120, 15),
    "modern-0.6b": (151936, 596_049_920, 16),
    "modern-1b": (32000, 1_100_048_384, 32),
}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return small(request.param)


def test_a_token_changes_the_logits_at_its_position_and_after_and_none_before(model: LanguageModel) -> None:
    tokens = random_tokens(2, BLOCK)
    before = model.logits(tokens).unbind(1)
    for changed in range(BLOCK):
        other = tokens.clone()
        other[:, changed] = (other[:, changed] + 1) % WORDS
        # To the bit: an attention weight of 1e-9 on a later token would be a leak too.
        same = [torch.equal(a, b) for a, b in zip(before, model.logits(other).unbind(1), strict=True)]
        assert same == [True] * changed + [False] * (BLOCK - changed)


def test_documents_see_nothing_of_each_other(model: LanguageModel) -> None:
    """Two documents in one sequence have the logits that each has alone."""
    tokens, documents = random_tokens(1, BLOCK), torch.tensor([[3] * 3 + [4] * 5])
    assert positions(tokens, None, documents).tolist() == [[*range(3), *range(5)]]
    together = model.padded_logits(model.activations(tokens, None, documents))[..., :WORDS]
    alone = torch.cat([model.logits(tokens[:, :3]), model.logits(tokens[:, 3:])], 1)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_size_has_the_parameters_of_the_published_shape(name: str) -> None:
    kind, (vocabulary, *published) = configured(f"model={name}", "model.vocab_multiple=1").model, PUBLISHED[name]
    assert isinstance(kind, Language)
    with torch.device("meta"):  # shapes without memory: gpt2-xl alone would be 6 GB
        model = build_language_model(kind, vocabulary)
    assert [sum(p.numel() for p in model.parameters()), kind.n_head] == published
    assert kind.parameters(vocabulary) == published[0]


@pytest.mark.parametrize("shape", ["model.n_head=5", "model.head_dim=5", "model.n_kv_head=4"])
def test_shapes_that_cannot_be(shape: str) -> None:
    assert [problem.split()[0] for problem in problems("model=modern-nano", shape)] == [shape]


def test_the_seed_before_a_forward_decides_its_dropout_and_in_eval_mode_there_is_none() -> None:
    tokens = random_tokens(2, BLOCK)

    def losses(model: LanguageModel) -> list[float]:
        found = list[float]()
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(float(model(tokens, tokens)[0]))
        return found

    dropping = small("gpt", dropout=0.5)
    assert losses(dropping) == losses(small("gpt"))
    first, again, other = losses(dropping.train())
    assert first == again != other


def test_each_target_counts_as_its_weight_says_and_ignored_ones_do_not(model: LanguageModel) -> None:
    tokens, targets = random_tokens(6, BLOCK).chunk(2)
    targets[0, 3:] = IGNORE
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(2)) * 2
    counts = targets != IGNORE
    losses = -model.logits(tokens).double().log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    for given, weight in (([], counts), ([torch.ones(targets.shape)], counts), ([weights], weights * counts)):
        loss, count = model(tokens, targets, *given)
        assert loss.item() == pytest.approx((losses * weight).sum().item(), rel=1e-5)
        assert count.item() == pytest.approx(weight.double().sum().item(), rel=1e-6)
    assert [float(x) for x in model(tokens, torch.full_like(targets, IGNORE))] == [0, 0]


def test_logits_and_sums_are_float32_under_bf16_autocast(model: LanguageModel) -> None:
    """A sum of thousands of losses would lose its last two digits in bf16."""
    tokens, targets = random_tokens(16, BLOCK).chunk(2)
    exact, _ = model(tokens, targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss, count = model(tokens, targets)
        logits = model.logits(tokens)
    assert {loss.dtype, count.dtype, logits.dtype} == {torch.float32}
    assert exact.item() != loss.item() == pytest.approx(exact.item(), rel=0.02)  # autocast was at work
    # not representable in bf16, so no rounding to it happened on the way
    assert loss.bfloat16().float().item() != loss.item()
