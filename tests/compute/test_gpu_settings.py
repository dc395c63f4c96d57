"""What a GPU is told before the first kernel. No GPU is needed: torch's settings can be read without one."""

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

from mingpt.compute import numerics
from mingpt.compute.numerics import pin
from mingpt.errors import UserError
from tests.kits.config_kit import configured, problems

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


@pytest.mark.parametrize(("precision", "reduce"), [("fp32", "exact"), ("tf32", "fast"), ("bf16", "exact")])
def test_tf32_only_where_it_is_asked_for_and_exact_is_strict(precision: str, reduce: str, hopper: None) -> None:
    pin(configured(f"precision={precision}", f"reduce={reduce}"), GPU)
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is (precision == "tf32")
    assert torch.are_deterministic_algorithms_enabled() is (reduce == "exact")
    assert torch.utils.deterministic.fill_uninitialized_memory is False  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("setting", ["precision=tf32", "train.attention=fa3"])
def test_a_device_refuses_what_it_has_not(
    setting: str, device: torch.device, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserError, match=f"^{setting}: "):
        pin(configured("precision=bf16", "model.dropout=0", setting), device)


def test_flash_attention_3_is_activated_and_recorded_and_who_lacks_it_is_told_which_build_can_train(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, activate = list[str](), "torch.nn.attention.activate_flash_attention_impl"
    monkeypatch.setattr(activate, asked.append, raising=False)
    pin(configured(), GPU)
    assert asked == []
    pin(configured(*FA3), GPU)
    assert asked == ["FA3"]
    assert numerics.fingerprint(configured(*FA3), CPU, "")["attention"] == "scaled_dot_product_attention fa3"

    monkeypatch.setattr(
        "torch.nn.attention.activate_flash_attention_impl", lambda _: import_module("flash_attn_interface")
    )
    with pytest.raises(UserError, match=r"^train\.attention=fa3: .*flash_attn_interface.* flash-attn-3 of PyTorch"):
        pin(configured(*FA3), GPU)


@pytest.mark.parametrize(
    ("overrides", "cure"),
    [
        ((*FA3, "precision=fp32"), "precision=bf16"),
        ((*FA3, "model.dropout=0.1"), "model.dropout=0"),
        ((*FA3, "world.device=cpu"), "world.device=cpu"),
        (("precision=tf32", "world.device=cpu"), "world.device=cpu"),
    ],
)
def test_settings_that_forbid_each_other_are_told_at_once(overrides: tuple[str, ...], cure: str) -> None:
    (problem,) = problems(*overrides)
    assert cure in problem


def test_a_compiler_is_looked_for_before_the_first_step(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, torch ends the first step with a stack trace and 70, as a crash that a retry may cure."""
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    config, there = configured("train.compile=true", "precision=bf16"), ["g++", "clang"]
    monkeypatch.setattr(numerics.shutil, "which", lambda name: name if name in there else None)
    for device in (CPU, GPU):
        numerics.require(config, device)
    there.clear()
    for device in (CPU, GPU):
        with pytest.raises(UserError, match=r"^train\.compile=true: "):
            numerics.require(config, device)
