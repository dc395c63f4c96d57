"""`python benchmarks/generate.py [--model gpt2 --vocabulary 50257]`: speed of generation as ratios, printed as JSON.

Compared: `--tokens` tokens from a prompt of 16, on the CPU, random weights, `--threads` threads:
  cached, uncached          ours with the KV cache and without it, greedy
  transformers              its `generate` with the same weights, greedy: it must give the same tokens
  sampling, transformers_sampling   both at temperature 0.8 among the 50 likeliest
  batch, transformers_batch         8 samples at once, greedy

All of them run in each of `--rounds` rounds, so that a machine whose speed drifts slows all of them alike. A ratio is
the median over the rounds of the ratios within a round. The ratios of CPU seconds are printed, too: on a busy machine,
trust those.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from mingpt.compose.groups import config_dir
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.sampling import generate_stream

BLOCK, PROMPT, BATCH = 1024, 16, 8


def ours(name: str, vocabulary: int) -> GPT:
    """A GPT of random weights, scaled up: with fresh ones all tokens are about equally likely, and rounding decides."""
    shape: Any = OmegaConf.to_container(OmegaConf.load(config_dir() / "model" / f"{name}.yaml"))
    size = {key: shape[key] for key in ("n_layer", "n_head", "n_embd")}
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=vocabulary, block_size=BLOCK, **size))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.eval()


def theirs(model: GPT) -> GPT2LMHeadModel:
    """transformers' GPT-2 with the same weights."""
    c = model.config
    config = GPT2Config(
        vocab_size=c.vocab_size,
        n_positions=c.block_size,
        n_embd=c.n_embd,
        n_layer=c.n_layer,
        n_head=c.n_head,
        bos_token_id=None,
        eos_token_id=None,
    )
    other = GPT2LMHeadModel(config).eval()
    missing, unexpected = other.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    assert missing in ([], ["lm_head.weight"]), missing  # tied to wte
    other.tie_weights()
    return other


def contestants(model: GPT, other: Any, tokens: int) -> dict[str, Callable[[], Tensor]]:
    prompt = torch.randint(model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    several = prompt.repeat(BATCH, 1)

    def stream(rows: Tensor, **options: Any) -> Tensor:
        return torch.stack(list(generate_stream(model, rows, tokens, **options)), 1)

    def transformers(rows: Tensor, **options: Any) -> Tensor:
        out = other.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
        return out[:, PROMPT:]

    return {
        "cached": lambda: stream(prompt, temperature=0),
        "uncached": lambda: stream(prompt, temperature=0, cached=False),
        "transformers": lambda: transformers(prompt, do_sample=False),
        "sampling": lambda: stream(prompt, temperature=0.8, top_k=50),
        "transformers_sampling": lambda: transformers(prompt, do_sample=True, temperature=0.8, top_k=50),
        "batch": lambda: stream(several, temperature=0),
        "transformers_batch": lambda: transformers(several, do_sample=False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-mini", help="one of configs/model (default: gpt-mini)")
    parser.add_argument("--vocabulary", type=int, default=65, help="number of tokens (default: 65)")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = ours(options.model, options.vocabulary)
    other = theirs(model)
    calls = contestants(model, other, options.tokens)
    speeds: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.rounds):
        generated: dict[str, Tensor] = {}
        for name, call in calls.items():
            began, cpu_began = time.perf_counter(), time.process_time()
            generated[name] = call()
            speeds[name].append(generated[name].numel() / (time.perf_counter() - began))
            cpu[name].append(generated[name].numel() / (time.process_time() - cpu_began))
        same = {name: torch.equal(generated["cached"], generated[name]) for name in ("uncached", "transformers")}
        same["transformers_batch"] = torch.equal(generated["batch"], generated["transformers_batch"])

    def ratios(of: dict[str, list[float]]) -> dict[str, float]:
        pairs = {
            "cached / uncached": ("cached", "uncached"),
            "ours / transformers, greedy": ("cached", "transformers"),
            "ours / transformers, sampling": ("sampling", "transformers_sampling"),
            f"ours / transformers, {BATCH} at once": ("batch", "transformers_batch"),
        }
        return {
            label: round(statistics.median(x / y for x, y in zip(of[a], of[b], strict=True)), 3)
            for label, (a, b) in pairs.items()
        }

    print(
        json.dumps(
            {
                "model": options.model,
                "vocabulary": options.vocabulary,
                "tokens_per_second": {name: round(statistics.median(s), 1) for name, s in speeds.items()},
                **ratios(speeds),
                "in CPU seconds": ratios(cpu),
                "the same tokens": same,
                "rounds": options.rounds,
                "tokens": options.tokens,
                "threads": options.threads,
                "all": {name: [round(x, 1) for x in s] for name, s in speeds.items()},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
