"""All that the bits of a result depend on besides (config, step): `pin` fixes what it can, `fingerprint` records it."""

import os
import platform
import shutil
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mingpt import NUMERICS
from mingpt.cli.console import printable
from mingpt.compute import compiler
from mingpt.config import plugin
from mingpt.config.imports import version_of
from mingpt.config.schema import OWN, Config
from mingpt.config.section import Own
from mingpt.errors import UserError

Fingerprint = dict[str, Any]  # what bits depend on, plain

PROBED = ((33, 96, 40), (64, 1024, 64), (128, 384, 64))  # (a, b, c): matrices (a, b) @ (b, c); takes milliseconds
HOPPER = 9  # its compute capability


def pin(config: Config, device: torch.device) -> None:
    """Make this process compute deterministically, in config.precision. Call it before the first kernel.

    Raises UserError if this device has no such precision or attention.
    """
    require(config, device)
    # Threads share the rows of a sum, so their number decides the order of its additions. Not by cores: a resume may
    # find another machine.
    torch.set_num_threads(config.train.threads)
    if device.type == "cuda":
        # Without it, cuBLAS chooses a workspace per stream, and with it the order of additions.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Otherwise some kernels add with atomics, in another order each time: the backward of an embedding, for one.
        # The same switch as torch.use_deterministic_algorithms, which imports torch's compiler to tell it, too: 6 s of
        # an eager start beside an H200. Where steps are compiled, compiler.ready tells it.
        torch.set_deterministic_debug_mode("error" if config.reduce == "exact" else "default")
        # It fills each torch.empty with NaN, which costs time; nothing here reads memory before writing it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cuda.matmul.allow_tf32 = config.precision == "tf32"
        torch.backends.cudnn.allow_tf32 = config.precision == "tf32"
    if config.train.attention == "fa3":
        try:
            from torch.nn.attention import activate_flash_attention_impl  # older ones lack it

            activate_flash_attention_impl("FA3")
        except (ImportError, RuntimeError) as error:
            raise UserError(
                f"train.attention=fa3: FlashAttention-3 can't be loaded ({error}): install flash-attn-3 of PyTorch's "
                "own package index (builds on PyPI have no backward), or use train.attention=torch"
            ) from error
    if config.train.compile:
        compiler.ready(config)


def require(config: Config, device: torch.device) -> None:
    """Raise UserError if this device has not the precision or the attention that the config asks for."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else "this machine's CPU"
    if config.precision == "tf32" and not (cuda and torch.cuda.is_tf32_supported()):
        raise UserError(f"precision=tf32: {name} has no such numbers (Ampere and newer GPUs have): use precision=fp32")
    if config.train.attention == "fa3" and not (cuda and torch.cuda.get_device_capability(device)[0] == HOPPER):
        raise UserError(f"train.attention=fa3: {name} is no Hopper GPU (H100, H200): use train.attention=torch")
    # What Triton compiles its launchers with, and Inductor its kernels for CPUs.
    compilers = [os.environ.get("CC", "gcc"), "clang"] if cuda else [os.environ.get("CXX", "g++")]
    if config.train.compile and not any(map(shutil.which, compilers)):
        raise UserError(
            f"train.compile=true: there is no compiler ({' or '.join(compilers)}) on this machine: install one "
            "(apt install g++), or use train.compile=false"
        )


def slow_precision(config: Config, device: torch.device) -> str | None:
    """A sentence for the log if fp32 leaves most of this device unused."""
    if config.precision != "fp32" or device.type != "cuda" or not torch.cuda.is_bf16_supported(False):
        return None
    return "precision=fp32 does not use this GPU's tensor cores: precision=bf16 or tf32 is several times as fast"


def autocast_for(config: Config, device: torch.device) -> Any:
    """The context manager under which the model computes in config.precision."""
    if config.precision in ("fp32", "tf32"):
        return nullcontext()
    return torch.autocast(device.type, {"bf16": torch.bfloat16, "fp16": torch.float16}[config.precision])


def fingerprint(config: Config, device: torch.device, data_sha256: str) -> Fingerprint:
    """Record what bits depend on: with reduce=exact, runs of one config with equal ones are equal. Call `pin` first.

    data_sha256: of the data's content.
    """
    code, imports = plugin.code("model", config.model) if isinstance(config.model, Own) else (None, None)
    own = dict[str, list[str | None]]()
    for name in OWN:
        part = getattr(config, name)
        if isinstance(part, Own):
            own[name] = [*plugin.code(name, part)]
    return {
        **machine(device),
        "triton": version_of("triton") if config.train.compile else None,
        # On a GPU the host adds nothing up, so a machine with other cores is the same there.
        "threads": None if device.type == "cuda" else config.train.threads,
        "precision": config.precision,
        "compile": config.train.compile,
        "reduce": config.reduce,
        "optimizer": "own" if config.optimizer.target else f"{config.optimizer.name} fused",
        "attention": "scaled_dot_product_attention" + (" fa3" if config.train.attention == "fa3" else ""),
        "microbatch": [config.batch.micro_size, config.model.block_size],
        "data": data_sha256,
        # `data` is a hash of the text's bytes; these packages turn the bytes into tokens.
        "tokenizers": {p: version_of(p) for p in config.data.encoders()} or None,
        "init_from": None,  # sha256 of the files with the initial weights; train/origin.py sets it
        "code": code,
        "imports": imports,
        "own": own or None,  # code of the user's own for other sections; its bits depend on that, too
    }


def machine(device: torch.device) -> Fingerprint:
    """The kind of machine that bits belong to, with this package's and torch's versions."""
    cuda = device.type == "cuda"
    return {
        "mingpt": NUMERICS,
        "device": torch.cuda.get_device_name(device) if cuda else f"cpu {torch.backends.cpu.get_cpu_capability()}",
        "cpu": None if cuda else cpu_vendor(),
        "probe": probe(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "gpu": gpu(device) if cuda else None,
    }


def gpu(device: torch.device) -> Fingerprint:
    return {
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count,
        "cudnn": torch.backends.cudnn.version(),
        "hip": torch.version.hip,
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


def cpu_vendor() -> str:
    """Architecture and vendor of the CPU, by which MKL and oneDNN choose their kernels."""
    # Not the model's name, by which nothing is chosen: it would tell of changes of bits that there are not.
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("vendor_id", "CPU implementer"):
                return f"{platform.machine()} {value.strip()}"
    return platform.machine()


def probe(device: torch.device) -> str:
    """A hash over the bits of a few matrix products.

    Math libraries choose kernels, and so the order of additions, by CPU model and environment variables. A choice that
    the other fields do not record still changes this hash.
    """
    generator = torch.Generator().manual_seed(1)
    powers = torch.tensor([2.0**e for e in range(-29, -17)])

    def fixed(*shape: int) -> Tensor:
        """Numbers that are the same on every machine, with sums that need rounding."""
        mantissa = torch.randint(-(2**23), 2**23, shape, generator=generator).float()
        return mantissa * powers[torch.randint(len(powers), shape, generator=generator)]

    products = list[Tensor]()
    for m, k, n in PROBED:
        a, b = fixed(m, k).to(device), fixed(k, n).to(device)
        # Both: MKL_CBWR changes products in fp32, ONEDNN_MAX_CPU_ISA those in bf16.
        for dtype in (torch.float32, torch.bfloat16):
            products.append(a.to(dtype) @ b.to(dtype))
    return digest(products)


def digest(tensors: Iterable[Tensor]) -> str:
    """A short hash of the tensors' bits."""
    content = sha256()
    for tensor in tensors:
        content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()[:16]


def changes(old: Fingerprint, new: Fingerprint) -> tuple[list[str], list[str]]:
    """(differences between two fingerprints, keys that only the new one has)."""
    # Only keys that both have: what one of both did not record is unknown, and no change.
    both = old.keys() & new.keys()
    changed = differences({k: old[k] for k in both}, {k: new[k] for k in both})
    return changed, [k for k, value in new.items() if k not in old and value is not None]


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """`key: old -> new` for each leaf in which two nested dicts differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = list[str]()
        for key in sorted(old.keys() | new.keys()):
            lines += differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
        return lines
    return [] if old == new else [printable(f"{prefix}: {old} -> {new}")]  # the old one comes from a file
