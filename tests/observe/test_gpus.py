"""The GPUs' figures in the metrics, by a stand-in for NVML: there is no GPU here."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from mingpt.metrics import read_metrics
from mingpt.observe import gpus as gpus_module
from mingpt.observe.events import StepDone
from mingpt.observe.gpus import Gpus, open_gpus
from mingpt.observe.jsonl import MetricsLog


def two_l4s(ecc: int = 0) -> Any:
    """NVML, with answers of two GPUs: the first throttles in the heat; the second has no ECC."""

    def ecc_errors(handle: str, kind: int, counter: int) -> int:
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        if handle == "GPU-b":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(nvml.ecc)

    def event(events: Any, milliseconds: int) -> Any:
        if not nvml.xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        handle, xid = nvml.xids.pop()
        return SimpleNamespace(device=handle, eventData=xid)

    nvml = SimpleNamespace(**vars(pynvml), ecc=ecc, xids=[])
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = nvml.nvmlDeviceGetUUID = str
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = {"GPU-a": 0x21, "GPU-b": 0x1}.get  # 0x1: idle
    nvml.nvmlDeviceGetTotalEccErrors = ecc_errors
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=7 * 2**30)
    nvml.nvmlDeviceGetTemperature = lambda handle, sensor: 88 if handle == "GPU-a" else 60
    nvml.nvmlEventSetWait_v2 = event
    return nvml


def test_figures_are_in_the_metrics(tmp_path: Path) -> None:
    gpus = Gpus(two_l4s(), ["a", "b"], print)
    log = MetricsLog(str(tmp_path), 1, print, more=gpus.row)
    log.on(StepDone(1, 2.0, 1.0))
    gpus.newest = gpus.sample()
    log.on(StepDone(2, 2.0, 1.0))
    first, second = read_metrics(str(tmp_path))
    assert "gpu_temperature" not in first
    assert {name: value for name, value in second.items() if name.startswith("gpu_")} == {
        "gpu_temperature": [88, 60],
        "gpu_memory_used": [7 * 2**30] * 2,
        "gpu_throttled": [["software thermal slowdown"], []],
        "gpu_ecc_errors": [0, None],
        "gpu_xids": [[], []],
    }


def test_a_sick_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus_module, "SAMPLE_SECONDS", 0.2)
    nvml, lines = two_l4s(ecc=3), list[str]()
    gpus = Gpus(nvml, ["a", "b"], lines.append)
    gpus.sample()
    assert lines == []  # errors of a time before this attempt
    nvml.ecc, nvml.xids = 5, [("GPU-b", 79), ("GPU-b", 79)]
    for _ in range(3):
        gpus.wait(None)
    assert gpus.sample()["gpu_xids"] == [[], [79]]
    assert all(word in lines[0] for word in ("GPU 1 on", "XID 79"))
    assert all(word in lines[1] for word in ("GPU 0 on", "2 more"))
    gpus.sample()
    assert len(lines) == 2, "said again, though there are no more"


def test_without_a_gpu_nothing_is_asked_and_without_nvml_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert open_gpus(torch.device("cpu")) is None
    assert capsys.readouterr().out == ""
    assert open_gpus(torch.device("cuda", 0)) is None
    assert capsys.readouterr().out.startswith("no figures of the GPUs")
