"""What a GPU is told before the first kernel. No GPU is needed: torch's settings can be read without one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from config_kit import configured
from mingpt.compute import numerics
from mingpt.compute.numerics import pin, slow_precision
from mingpt.errors import UserError
from mingpt.observe.speed import peak_flops

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
FA3 = ("train.attention=fa3", "precision=bf16", "model.dropout=0")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's answers on an H100. Afterwards its settings are as they were."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated=True: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_tf32_is_used_only_where_it_is_asked_for(precision: str, hopper: None) -> None:
    pin(configured(f"precision={precision}"), GPU)
    assert torch.backends.cuda.matmul.allow_tf32 is (precision == "tf32")
    assert torch.backends.cudnn.allow_tf32 is (precision == "tf32")


@pytest.mark.parametrize("reduce", ["exact", "fast"])
def test_exact_is_strict_and_fills_no_memory(reduce: str, hopper: None) -> None:
    pin(configured(f"reduce={reduce}"), GPU)
    assert torch.are_deterministic_algorithms_enabled() is (reduce == "exact")
    assert torch.utils.deterministic.fill_uninitialized_memory is False  # type: ignore[attr-defined]


def test_a_device_without_tf32_refuses_it(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: False)
    for device in (CPU, GPU):
        with pytest.raises(UserError, match=r"precision=tf32: .* has no such numbers .*: use precision=fp32"):
            pin(configured("precision=tf32"), device)
    with pytest.raises(UserError, match=r"precision=tf32 is what GPUs have, but world\.device=cpu"):
        configured("precision=tf32", "world.device=cpu")


def test_fp32_on_a_gpu_says_that_it_is_slow(hopper: None) -> None:
    assert "precision=bf16 or tf32" in str(slow_precision(configured(), GPU))
    assert slow_precision(configured("precision=tf32"), GPU) is None
    assert slow_precision(configured(), CPU) is None


def test_tf32_does_half_of_what_bf16_does(hopper: None) -> None:
    assert [peak_flops(GPU, precision) for precision in ("fp32", "tf32", "bf16")] == [67e12, 494.5e12, 989e12]


def test_flash_attention_3_is_activated_and_recorded(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr(numerics, "activate_flash_attention_impl", asked.append)
    pin(configured(), GPU)
    assert asked == []
    pin(configured(*FA3), GPU)
    assert asked == ["FA3"]
    with_it, without = (numerics.fingerprint(configured(*o), CPU, "")["attention"] for o in (FA3, ()))
    assert (with_it, without) == ("scaled_dot_product_attention fa3", "scaled_dot_product_attention")


def test_flash_attention_3_says_what_it_lacks(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"FlashAttention-3 can't be loaded .*flash_attn_interface"):
        pin(configured(*FA3), GPU)  # torch's own function: the package is not installed here
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for device in (CPU, GPU):
        with pytest.raises(UserError, match=r"train\.attention=fa3: .* is no Hopper GPU"):
            pin(configured(*FA3), device)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("precision=fp32", "not in precision=fp32: set precision=bf16"),
        ("model.dropout=0.1", "has no dropout: set model.dropout=0"),
        ("world.device=cpu", "needs a GPU, but world.device=cpu"),
    ],
)
def test_flash_attention_3_forbids_settings_at_once(override: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        configured(*FA3, override)


def test_a_run_that_asks_a_cpu_for_tf32_ends_with_64(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mingpt.train", "precision=tf32", "data=random", f"run.dir={tmp_path}/run"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, env=hidden, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 64, ended.stderr
    assert "precision=tf32: this machine's CPU has no such numbers" in ended.stderr
