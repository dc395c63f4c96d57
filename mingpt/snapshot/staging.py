"""Copy this process's share of the state at a step's boundary, so that training can go on while it is written."""

import torch
from torch import Tensor

from mingpt.snapshot.format import Part, State, lay_out
from mingpt.world.world import World

StagedPart = tuple[Part, dict[str, Tensor]]  # a part and its tensors, in CPU memory


class Staging:
    """CPU buffers that are kept from one snapshot to the next: page faults of new memory cost more than the copy."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def copy_share(self, state: State) -> list[StagedPart]:
        """Start copying this process's parts. On CUDA the copies may still be under way at the return."""
        twice = state["model"].keys() & state["optimizer"].keys()
        if twice:
            raise ValueError(f"both kinds of state have a tensor named {', '.join(sorted(twice))}")
        parts = lay_out(state)
        staged: list[StagedPart] = []
        on_device = any(t.is_cuda for tensors in state.values() for t in tensors.values())
        stream = torch.cuda.Stream() if on_device else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # None: the current stream
            for i in self.world.share(len(parts)):
                part = parts[i]
                staged.append((part, {n: self._copy(n, state[part.kind][n]) for n in part.names}))
        if stream is not None:
            self._copied = torch.cuda.Event()
            self._copied.record(stream)
        return staged

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)

    def hold_update(self) -> None:
        """Make the current CUDA stream wait for the copies before it changes the state. Does not block the host."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Block until the copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()
