"""Generates text with a GPT, token by token."""

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor

from mingpt.model.language import KVCache, LanguageModel


@torch.no_grad()
def generate_stream(
    model: LanguageModel,
    tokens: Tensor,
    count: int,
    *,
    lengths: Sequence[int] | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
    cached: bool = True,
) -> Iterator[Tensor]:
    """Continue each row of `tokens` (batch, time >= 1) by `count` tokens, one position of all rows at a time.

    Yields the tokens (batch,) of each position, from the end of the shortest prompt on; where a row's prompt is longer,
    that is the prompt's token. lengths: of each row's prompt (default: all of the row). numbers: the sample number of
    each row (default: 0, 1, …). A sample depends on its prompt, seed and number, but not on the other rows.
    temperature: 0 takes the likeliest token. Raises FloatingPointError if the logits are not finite.
    """
    batch, block = len(tokens), model.config.block_size
    lengths = lengths or [tokens.shape[1]] * batch
    first, last = min(lengths), max(lengths) + count
    ends = torch.tensor(lengths)
    text = F.pad(tokens, (0, last - tokens.shape[1]))
    # Drawn beforehand, by sample: so a text does not depend on which others are made beside it.
    draws = torch.stack([_draws(seed, n, count) for n in numbers or range(batch)])
    ends, draws = ends.to(text.device), draws.to(text.device)
    caches = [KVCache(min(last, block)) for _ in range(model.config.n_layer)] if cached else None
    training = model.training
    model.eval()
    try:
        for position in range(first, last):
            if caches and position <= block:
                x = model.activations(text[:, caches[0].length : position], caches)
            else:
                # The window slides: every token's position changes, so cached keys and values are wrong.
                x = model.activations(text[:, max(0, position - block) : position])
            logits = finite(model.padded_logits(x[:, -1])[:, : model.config.vocab_size])
            draw = draws.gather(1, (position - ends).clamp(0, count - 1)[:, None])
            chosen = sample(logits, draw, temperature, top_k, top_p)
            text[:, position] = torch.where(position < ends, text[:, position], chosen)
            yield text[:, position]
    finally:
        model.train(training)


def generate(
    model: LanguageModel,
    tokens: Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Tensor:
    """`tokens` (batch, time >= 1) continued by `count` tokens; parameters as for `generate_stream`.

    The same seed gives the same text on the same machine. The model sees the newest block_size tokens.
    """
    new = generate_stream(model, tokens, count, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    return torch.stack([*tokens.unbind(1), *new], 1)


def _draws(seed: int, number: int, count: int) -> Tensor:
    """Random numbers in [0, 1), one per token of a sample; the same on any device."""
    sample_seed = int.from_bytes(blake2b(repr((seed, number)).encode(), digest_size=8).digest(), "little")
    return torch.rand(count, generator=torch.Generator().manual_seed(sample_seed))


def finite(logits: Tensor) -> Tensor:
    """Returns the logits. Raises FloatingPointError if they are not all finite: no token could be sampled."""
    if not logits.isfinite().all():
        raise FloatingPointError("its logits are not all finite numbers")
    return logits


def running_sum(x: Tensor) -> Tensor:
    """Add up along the last dimension, like cumsum(-1)."""
    # cumsum adds on CUDA in an order of its own, and raises in torch's deterministic mode.
    step = 1
    while step < x.shape[-1]:
        x = torch.cat([x[..., :step], x[..., step:] + x[..., :-step]], -1)
        step *= 2
    return x


def sample(logits: Tensor, draw: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Sample a token for each row of `logits` (batch, vocabulary), by a random number for each row, `draw` (batch, 1).

    top_k: sample among the k likeliest tokens. top_p: of these, among the smallest set of likeliest tokens whose
    probabilities sum up to top_p (nucleus sampling, Holtzman et al. 2020).
    """
    if temperature == 0:
        return logits.argmax(-1)
    by_probability = None
    if top_k is not None or top_p is not None:
        logits, by_probability = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    # In float64 and with a maximum of 0: a tiny temperature makes no infinity, and does not round to 0 itself.
    logits = (logits - logits.amax(-1, keepdim=True)).double()
    probabilities = torch.softmax(logits / temperature, -1)
    cumulative = probabilities.cumsum(-1) if probabilities.is_cpu else running_sum(probabilities)
    kept = cumulative[:, -1:]
    if top_p is not None:
        kept = cumulative.gather(-1, ((cumulative - probabilities) < top_p).sum(-1, keepdim=True) - 1)
    # Inverse transform sampling: the first token whose cumulative probability exceeds draw * kept.
    index = torch.searchsorted(cumulative, draw * kept, right=True)
    return (index if by_probability is None else by_probability.gather(-1, index)).squeeze(-1)
