"""Figures of the GPUs of rank 0's node for the metrics: temperature, memory, throttling, ECC errors, XIDs.

Not tried on a GPU so far: the tests have a recorded stand-in for NVML.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from mingpt.console import say
from mingpt.storage import install

SAMPLE_SECONDS = 10.0
# NVML's bits of what slows a GPU's clocks down. Left out are those of an idle GPU and of clocks that somebody has set.
THROTTLED = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class Gpus:
    """Sampled in a thread: the driver of a sick GPU may answer late, or never.

    nvml: the module pynvml. uuids: of the GPUs, as torch names them.
    """

    def __init__(self, nvml: Any, uuids: Sequence[str], say: Callable[[str], None]) -> None:
        self.nvml, self.say, self.newest = nvml, say, dict[str, Any]()
        nvml.nvmlInit()
        self.handles = [nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
        self.xids: list[list[int]] = [[] for _ in uuids]
        self._ecc: list[int | None] = [None for _ in uuids]
        self._pause = threading.Event()  # never set

    def start(self) -> None:
        threading.Thread(target=self._sample_for_ever, name="gpus", daemon=True).start()

    def row(self) -> dict[str, Any]:
        """The newest sample, for a row of the metrics; empty before the first one."""
        return self.newest

    def sample(self) -> dict[str, Any]:
        """A list of figures for each quantity, one for each GPU. None: this GPU does not have it.

        gpu_temperature: °C. gpu_memory_used: bytes, of all processes. gpu_throttled: reasons. gpu_ecc_errors: not
        corrected, since the driver was loaded. gpu_xids: the driver's errors since the attempt began, each number once.
        """
        nvml = self.nvml
        bits = [self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, h) for h in self.handles]
        ecc = [
            self._ask(
                nvml.nvmlDeviceGetTotalEccErrors, h, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
            for h in self.handles
        ]
        for i, (before, after) in enumerate(zip(self._ecc, ecc, strict=True)):
            if before is not None and after is not None and after > before:
                self._warn(i, f"{after - before} more memory errors that ECC could not correct")
        self._ecc = ecc
        memory = [self._ask(nvml.nvmlDeviceGetMemoryInfo, h) for h in self.handles]
        return {
            "gpu_temperature": [
                self._ask(nvml.nvmlDeviceGetTemperature, h, nvml.NVML_TEMPERATURE_GPU) for h in self.handles
            ],
            "gpu_memory_used": [None if m is None else m.used for m in memory],
            "gpu_throttled": [
                None if b is None else [name for bit, name in THROTTLED.items() if b & bit] for b in bits
            ],
            "gpu_ecc_errors": ecc,
            "gpu_xids": [list(xids) for xids in self.xids],
        }

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except self.nvml.NVMLError:  # not supported, or the GPU is lost
            return None

    def _warn(self, gpu: int, what: str) -> None:
        self.say(f"SICK GPU: GPU {gpu} on {socket.gethostname()}: {what}")

    def _register(self) -> Any:
        """A set of events that gets the XIDs of all GPUs; None if the driver reports none."""
        nvml = self.nvml
        try:
            events = nvml.nvmlEventSetCreate()
            for handle in self.handles:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            return None
        return events

    def wait(self, events: Any) -> None:
        """Until the next sample; takes note of XIDs meanwhile."""
        until = time.monotonic() + SAMPLE_SECONDS
        while (left := until - time.monotonic()) > 0:
            with suppress(self.nvml.NVMLError):  # none came, or the GPU is lost
                self._note(self.nvml.nvmlEventSetWait_v2(events, int(left * 1000) + 1))
            # A driver that answers at once, again and again, must not keep a core busy.
            self._pause.wait(max(0.0, min(SAMPLE_SECONDS / 10, until - time.monotonic())))

    def _note(self, event: Any) -> None:
        nvml = self.nvml
        known = [nvml.nvmlDeviceGetUUID(handle) for handle in self.handles]
        gpu = known.index(nvml.nvmlDeviceGetUUID(event.device))
        if event.eventData not in self.xids[gpu]:
            self._warn(gpu, f"XID {event.eventData} (NVIDIA's list of XID errors says what that is)")
            self.xids[gpu].append(event.eventData)

    def _sample_for_ever(self) -> None:
        events = self._register()
        try:
            while True:
                self.newest = self.sample()
                if events is None:
                    self._pause.wait(SAMPLE_SECONDS)
                else:
                    self.wait(events)
        except Exception as error:  # nothing else would report it
            self.newest = {}
            self.say(f"GPU FIGURES end: {str(error) or type(error).__name__}")


def open_gpus(device: torch.device) -> Gpus | None:
    """The GPUs that this process sees, if it has any and NVML can be read; otherwise says why not."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        gpus = Gpus(pynvml, uuids, say)
    except Exception as error:
        cure = f": {install('gpu')}" if isinstance(error, ImportError) else ""
        say(f"no figures of the GPUs among the metrics: {str(error) or type(error).__name__}{cure}")
        return None
    gpus.start()
    return gpus
