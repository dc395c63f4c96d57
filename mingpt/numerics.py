"""What the bits of a result depend on besides (config, step): pinned where it can be, recorded where it can't."""

import os
from contextlib import nullcontext
from typing import Any

import torch

from mingpt import own
from mingpt.config import Config, OwnModel


def pin(config: Config, device: torch.device) -> None:
    """Make this process compute repeatably. Call it before the first kernel."""
    torch.set_num_threads(config.train.threads)
    if device.type == "cuda":
        # cuBLAS chooses its workspace, and so its order of additions, per stream unless it is told a fixed one.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(config.reduce == "exact")
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    if config.train.compile:
        from torch._dynamo import config as dynamo  # slow to import, and needed here only
        from torch._inductor import config as inductor

        dynamo.optimize_ddp = False  # it would cut the graph at DDP's buckets: other kernels, other bits
        inductor.deterministic = True


def autocast_for(config: Config, device: torch.device) -> Any:
    """The context in which the model computes in config.precision."""
    if config.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, {"bf16": torch.bfloat16, "fp16": torch.float16}[config.precision])


def fingerprint(config: Config, device: torch.device, data_sha256: str) -> dict[str, Any]:
    """Two runs of one config give equal bits if their fingerprints are equal (in `exact` mode)."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"cpu {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "threads": None if cuda else config.train.threads,
        "precision": config.precision,
        "compile": config.train.compile,
        "reduce": config.reduce,
        "optimizer": f"{config.optimizer.name} fused",
        "attention": "scaled_dot_product_attention",
        "microbatch": [config.batch.micro_size, config.model.block_size],
        "data": data_sha256,
        "init_from": None,  # the sha256 of the files that the run's first weights came from
        "code": own.source_sha256(config.model) if isinstance(config.model, OwnModel) else None,
    }


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """`key: old -> new` for each leaf in which two nested dicts differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [d for k in keys for d in differences(old.get(k), new.get(k), f"{prefix}.{k}" if prefix else k)]
    return [] if old == new else [f"{prefix}: {old} -> {new}"]
