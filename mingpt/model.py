"""GPT-2, exactly: the architecture of the published checkpoints, with Hugging Face's parameter names and shapes.

This file imports torch and nothing else of the project. Every parameter keeps the name and the layout that
`transformers` uses (`GPT2LMHeadModel`), so a snapshot's model part can be read by it as it is.

Sources: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; Karpathy's nanoGPT, for what to
leave out.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORE = -100  # a target that does not count, torch's and Hugging Face's convention


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. `vocab_multiple` pads the embedding's rows up to a multiple; 64 fits GPU tiles."""

    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float = 0.0
    vocab_multiple: int = 1

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple


class Projection(nn.Module):
    """An affine map whose weight is stored (in, out), as GPT-2's checkpoints store it; `nn.Linear` has (out, in)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class Past:
    """One layer's keys and values of the positions so far, kept so that they are computed once."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def joined(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of the next positions, (batch, head, time, size); returns all."""
        batch, heads, time, size = keys.shape
        if self.keys is None or self.values is None:
            self.keys, self.values = (keys.new_empty(batch, heads, self.room, size) for _ in range(2))
        start, self.length = self.length, self.length + time
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


class Attention(nn.Module):
    """Causal multi-head self-attention; position t sees positions 0..t and nothing later."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = Projection(config.n_embd, 3 * config.n_embd)
        self.c_proj = Projection(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, past: Past | None = None) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.c_attn(x).view(batch, time, 3, self.n_head, width // self.n_head).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if past:
            k, v = past.joined(k, v)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=k.shape[2] == time,  # else q is the newest position alone, which sees all the others
            dropout_p=self.dropout if self.training else 0.0,
        )
        y = self.c_proj(y.transpose(1, 2).reshape(batch, time, width))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = Projection(config.n_embd, 4 * config.n_embd)
        self.c_proj = Projection(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    """Pre-norm: each half reads a normalised copy and adds to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, past: Past | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), past)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """All but the output layer: tokens (batch, time) to activations (batch, time, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)

    def forward(self, tokens: Tensor, past: Sequence[Past] | None = None) -> Tensor:
        """past: one for each layer. With it, tokens are the text's first ones, or the one that comes next."""
        start = past[0].length if past else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = F.dropout(self.wte(tokens) + self.wpe(positions), self.dropout, self.training)
        for i, block in enumerate(self.h):
            x = block(x, past[i] if past else None)
        return self.ln_f(x)


class GPT(nn.Module):
    """A language model. The output layer is the token embedding itself (tied), so it has no parameter of its own."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                # 2 x layers additions flow into the residual stream; this keeps its variance at the start (GPT-2).
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))
            elif parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cross-entropy of `targets` (batch, time) given `tokens` (batch, time), both int64.

        weights: (batch, time) float32, how much each target counts; None: each counts once.
        Returns (sum of the losses in nats, float32 scalar; number of targets that counted, float32 scalar). Sums, not
        means, so that batches whose masks are uneven (targets of IGNORE) average right when they are added up.
        """
        loss, count, _ = self.loss_and_logits(tokens, targets, weights)
        return loss, count

    def loss_and_logits(
        self, tokens: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `forward` returns, and the logits that it comes from: (batch, time, padded_vocab_size)."""
        logits = self.padded_logits(self.transformer(tokens))
        if self.config.padded_vocab_size > self.config.vocab_size:
            # In the sum of the softmax the padding has weight exp(-inf) = 0: never predicted, never trained.
            logits[..., self.config.vocab_size :] = -torch.inf
        rows, flat = logits.flatten(0, 1), targets.flatten()
        if weights is None:
            loss = F.cross_entropy(rows, flat, ignore_index=IGNORE, reduction="sum")
            return loss, (targets != IGNORE).sum().float(), logits
        losses = F.cross_entropy(rows, flat, ignore_index=IGNORE, reduction="none")
        return (losses * weights.flatten()).sum(), (weights * (targets != IGNORE)).sum(), logits

    def padded_logits(self, activations: Tensor) -> Tensor:
        return F.linear(activations, self.transformer.wte.weight).float()

    def logits(self, tokens: Tensor, past: Sequence[Past] | None = None) -> Tensor:
        """Logits of the next token at every position: (batch, time) to (batch, time, vocab_size), padding left out."""
        return self.padded_logits(self.transformer(tokens, past))[..., : self.config.vocab_size]

    @torch.no_grad()
    def stream(
        self,
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
        batch, block = len(tokens), self.config.block_size
        ends = torch.tensor(lengths or [tokens.shape[1]] * batch)
        first, last = int(ends.min()), int(ends.max()) + count
        text = F.pad(tokens, (0, last - tokens.shape[1]))
        draws = torch.stack([_draws(seed, n, count) for n in numbers or range(batch)])
        ends, draws = ends.to(text.device), draws.to(text.device)
        past = [Past(min(last, block)) for _ in self.transformer.h] if cached else None
        training = self.training
        self.eval()
        try:
            for position in range(first, last):
                if past and position <= block:
                    x = self.transformer(text[:, past[0].length : position], past)
                else:  # once the window slides, each token is at another position than before: nothing kept is of use
                    x = self.transformer(text[:, max(0, position - block) : position])
                logits = finite(self.padded_logits(x[:, -1])[:, : self.config.vocab_size])
                draw = draws.gather(1, (position - ends).clamp(0, count - 1)[:, None])
                chosen = choose(logits, draw, temperature, top_k, top_p)
                text[:, position] = torch.where(position < ends, text[:, position], chosen)
                yield text[:, position]
        finally:
            self.train(training)

    def generate(
        self,
        tokens: Tensor,
        count: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> Tensor:
        """`tokens` (batch, time >= 1) continued by `count` tokens, as `stream` says.

        The same seed gives the same text on the same machine. In a context longer than block_size, only the newest
        block_size tokens are seen.
        """
        new = self.stream(tokens, count, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
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


def choose(logits: Tensor, draw: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """A token for each row of logits (batch, vocabulary), given a random number for each, (batch, 1).

    top_k: only the k likeliest are chosen from; top_p: of these, only the fewest likeliest that have at least this
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
