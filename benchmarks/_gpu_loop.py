"""nanoGPT's training loop, for `gpu_check.sh`: prints tokens a second as JSON.

The model is nanoGPT's own (--nanogpt: a folder with its model.py), or this project's: torch.compile of all of it, fused
AdamW, autocast, a plain sum of the microbatches' gradients, and nothing deterministic.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

VOCABULARY = 50304  # nanoGPT's, padded
Loss = Callable[[Tensor, Tensor], Tensor]


def theirs(checkout: Path, shape: dict[str, int]) -> tuple[nn.Module, Loss]:
    sys.path.insert(0, str(checkout))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    model: nn.Module = GPT(GPTConfig(vocab_size=VOCABULARY, dropout=0.0, bias=True, **shape))
    return model, lambda tokens, targets: model(tokens, targets)[1]


def ours(shape: dict[str, int]) -> tuple[nn.Module, Loss]:
    from mingpt.model.gpt2 import GPT, GPTConfig

    model = GPT(GPTConfig(vocab_size=VOCABULARY, **shape))
    return model, lambda tokens, targets: model(tokens, targets)[0] / targets.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("micro", "batch", "block", "steps", "warm"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--tiny", action="store_true")
    o = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    shape = {"n_layer": 3, "n_head": 3, "n_embd": 48} if o.tiny else {"n_layer": 12, "n_head": 12, "n_embd": 768}
    shape["block_size"] = o.block
    model, loss_of = theirs(o.nanogpt, shape) if o.nanogpt else ours(shape)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if not o.tiny:
        loss_of = torch.compile(loss_of)
    tokens = torch.randint(50257, (o.micro, o.block + 1), device=device)
    microbatches, seconds = o.batch // o.micro, []
    for _ in range(o.steps):
        began = time.perf_counter()
        for _ in range(microbatches):
            with torch.autocast(device, torch.bfloat16, enabled=not o.tiny):
                loss = loss_of(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            (loss / microbatches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    step = statistics.median(seconds[o.warm :])
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
    figures = {"tokens/s": round(o.batch * o.block / step), "ms a step": round(step * 1000, 1)}
    print(json.dumps(figures | {"peak GB": round(peak, 2)}))


if __name__ == "__main__":
    main()
