"""CudaGraph's errors, by recorded calls: torch's own context manager, on a stand-in for what needs a GPU's driver."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from mingpt.train.graphs import CudaGraph


class Stream:
    device_index = 0

    def __init__(self, device: torch.device) -> None:
        self.name = device.type
        self.waited_for = list[str]()

    def wait_stream(self, other: "Stream") -> None:
        self.waited_for.append(other.name)


class Gpu:
    """Its current stream, its random numbers (by name), and whether it ends a capture."""

    def __init__(self) -> None:
        self.main = self.stream = Stream(torch.device("cpu"))
        self.numbers, self.ends, self.mode, self.warned = "first", True, 0, False

    def clone_state(self) -> str:
        return f"copy of {self.numbers}"

    def graphsafe_set_state(self, numbers: str) -> None:
        self.numbers = numbers

    def capture_begin(self, **how: object) -> None:
        assert how["capture_error_mode"] == "thread_local"
        self.numbers = "capturing"

    def capture_end(self) -> None:
        if not self.ends:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.numbers = "first"

    def set_sync_debug_mode(self, mode: object) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        self.mode = {"error": 2}.get(str(mode), 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()

    @contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        before, gpu.stream = gpu.stream, stream
        try:
            yield
        finally:
            gpu.stream = before

    fakes = {
        "CUDAGraph": lambda: gpu,
        "Stream": Stream,
        "default_generators": (gpu,),
        "stream": stream,
        "current_stream": lambda device: gpu.stream,
        "set_stream": lambda stream: setattr(gpu, "stream", stream),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": gpu.set_sync_debug_mode,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 100,
        "max_memory_allocated": lambda device: 700,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    return gpu


def refuse() -> None:
    raise RuntimeError("refused")


def test_after_a_capture_that_cuda_does_not_end_all_is_as_before(gpu: Gpu) -> None:
    """torch stayed on the capture's stream, and up to torch 2.12 its random numbers could not be drawn any more."""
    gpu.ends = False
    with pytest.raises(RuntimeError, match="a previous error"):
        CudaGraph(torch.device("cuda", 0)).capture(refuse)
    assert gpu.stream is gpu.main
    assert gpu.numbers == "copy of first"


def test_a_capture_keeps_the_random_numbers_that_its_replays_draw(gpu: Gpu) -> None:
    CudaGraph(torch.device("cuda", 0)).capture(lambda: None)
    assert gpu.stream is gpu.main
    assert gpu.numbers == "first"


def test_what_a_failed_warm_up_has_written_to_is_not_used_before_it_has_ended(gpu: Gpu) -> None:
    with pytest.raises(RuntimeError, match="refused"):
        CudaGraph(torch.device("cuda", 0)).warm_up(refuse)
    assert gpu.main.waited_for == ["cuda"]


def test_waiting_is_an_error_in_the_second_warm_up_only_and_torchs_warning_is_not_shown(gpu: Gpu) -> None:
    modes = list[int]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CudaGraph(torch.device("cuda", 0)).warm_up(lambda: modes.append(gpu.mode)) == 600
    assert modes == [0, 2]
    assert gpu.mode == 0
    assert gpu.main.waited_for == ["cuda", "cuda"]
