"""Texts from a GPT: token after token, each sampled from the chances that the model gives."""

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor

from mingpt.model.gpt2 import GPT, KVCache


@torch.no_grad()
def generate_stream(
    model: GPT,
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

    lengths: how many of each row's tokens are its prompt (default: all). Yields (batch,) for each position from
    the end of the shortest prompt on; where a row's prompt is longer, what is yielded is the prompt's.
    numbers: of the samples that the rows are (default: 0, 1, …). A sample's text follows from its prompt, seed and
    number, whatever other rows there are; temperature 0 takes the likeliest token each time.
    """
    batch, block = len(tokens), model.config.block_size
    ends = torch.tensor(lengths or [tokens.shape[1]] * batch)
    first, last = int(ends.min()), int(ends.max()) + count
    text = F.pad(tokens, (0, last - tokens.shape[1]))
    draws = torch.stack([_draws(seed, n, count) for n in numbers or range(batch)])
    ends, draws = ends.to(text.device), draws.to(text.device)
    caches = [KVCache(min(last, block)) for _ in model.transformer.h] if cached else None
    training = model.training
    model.eval()
    try:
        for position in range(first, last):
            if caches and position <= block:
                x = model.transformer(text[:, caches[0].length : position], caches)
            else:  # once the window slides, each token is at another position than before: nothing kept is of use
                x = model.transformer(text[:, max(0, position - block) : position])
            logits = finite(model.padded_logits(x[:, -1])[:, : model.config.vocab_size])
            draw = draws.gather(1, (position - ends).clamp(0, count - 1)[:, None])
            chosen = sample(logits, draw, temperature, top_k, top_p)
            text[:, position] = torch.where(position < ends, text[:, position], chosen)
            yield text[:, position]
    finally:
        model.train(training)


def generate(
    model: GPT,
    tokens: Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Tensor:
    """`tokens` (batch, time >= 1) continued by `count` tokens, as `generate_stream` says.

    The same seed gives the same text on the same machine. In a context longer than block_size, only the newest
    block_size tokens are seen.
    """
    new = generate_stream(model, tokens, count, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    return torch.stack([*tokens.unbind(1), *new], 1)


def _draws(seed: int, number: int, count: int) -> Tensor:
    """A sample's random numbers in [0, 1), one for each of its tokens, the same on any device."""
    own = int.from_bytes(blake2b(repr((seed, number)).encode(), digest_size=8).digest(), "little")
    return torch.rand(count, generator=torch.Generator().manual_seed(own))


def finite(logits: Tensor) -> Tensor:
    """Those logits. Raises FloatingPointError if there are no chances in them, whose token would be any or none."""
    if not logits.isfinite().all():
        raise FloatingPointError("its logits are not all finite numbers")
    return logits


def sample(logits: Tensor, draw: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """A token for each row of logits (batch, vocabulary), given a random number for each, (batch, 1).

    top_k: only the k likeliest may come; top_p: of these, only the fewest likeliest that have at least this
    share of the chance.
    """
    if temperature == 0:
        return logits.argmax(-1)
    by_chance = None
    if top_k is not None or top_p is not None:
        logits, by_chance = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    # A temperature near 0 must not divide them to infinity, nor itself become the 0 that 1e-46 is in float32.
    logits = (logits - logits.amax(-1, keepdim=True)).double()
    chances = torch.softmax(logits / temperature, -1)
    up_to = chances.cumsum(-1)
    kept = up_to[:, -1:]
    if top_p is not None:
        kept = up_to.gather(-1, ((up_to - chances) < top_p).sum(-1, keepdim=True) - 1)
    # The first token up to which there is more than the drawn share of the chance that is kept.
    index = torch.searchsorted(up_to, draw * kept, right=True)
    return (index if by_chance is None else by_chance.gather(-1, index)).squeeze(-1)
