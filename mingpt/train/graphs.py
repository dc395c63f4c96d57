"""A microbatch's forward and backward as one CUDA graph: captured once in an attempt, then replayed.

All of it is a function of fixed shapes, so a GPU can be given the list of its kernels once. A replay then costs the
host the same for any model, where launching them one by one takes longer than a fast GPU computes: on an H200, 413 ms
of a step of GPT-2 124M in microbatches of 8, of which the GPU computed 162. The kernels are the same, and so are the
bits: that is checked when a graph is captured.

What runs around it is as without a graph. The gradients take the same way into the sum (`ExactReduction`), and with
several processes each one's last microbatch is computed as without a graph, since its backward sends them. So the order
of the collectives does not depend on who has a graph.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mingpt.compute.buckets import Bucket
from mingpt.compute.reduction import ExactReduction
from mingpt.train.context import StepContext

Work = Callable[[], None]  # what is captured, or done once before


class Recorder(Protocol):
    """What captures work and replays it: a device's; in tests, a stand-in that records operations on a CPU."""

    def warm_up(self, work: Work) -> int:
        """Do the work, as a capture would find it. Returns how many bytes it needs at its peak."""

    def free(self) -> float:
        """The device's bytes that nobody uses."""

    def capture(self, work: Work) -> None: ...

    def seed(self, seed: int) -> None:
        """Sets the seed of the random numbers that the next replay draws."""

    def replay(self) -> None: ...


class CudaGraph:
    """torch's CUDA graph on a stream of its own. https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs

    Two must not share a stream: with one, torch drops the cuBLAS workspaces that the other one's kernels use, too
    (pytorch#193402).
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.graph, self.stream = device, torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        self.generator = torch.cuda.default_generators[self.stream.device_index]

    def warm_up(self, work: Work) -> int:
        """Twice. The first time, libraries choose their kernels, and torch's compiler compiles its own.

        The second time, an operation that waits for the device is an error (RuntimeError): it can't be captured, and in
        a capture the error of its end would hide that one.
        """
        self._beside(work)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "a prototype, and does not yet detect all": the capture itself does
            torch.cuda.set_sync_debug_mode("error")
        try:
            self._beside(work)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        return torch.cuda.max_memory_allocated(self.device) - before

    def _beside(self, work: Work) -> None:
        """On the side stream: captures can't be on the default one, whose autograd nodes would drag it in."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                work()
        finally:  # after an error, too: what the work wrote to is freed, and its kernels may be still under way
            current.wait_stream(self.stream)

    def free(self) -> float:
        torch.cuda.empty_cache()  # what torch keeps of the warm-up nobody uses
        return torch.cuda.mem_get_info(self.device)[0]

    def capture(self, work: Work) -> None:
        current, numbers = torch.cuda.current_stream(self.device), self.generator.clone_state()
        try:
            # thread_local: NCCL's watchdog, the snapshot writer and the loader use CUDA meanwhile, and may.
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                work()
        except BaseException:
            # If CUDA refuses to end a capture, torch (seen in 2.13) stays on the stream of it; and up to torch 2.12, a
            # later dropout raises "Offset increment outside graph capture".
            torch.cuda.set_stream(current)
            self.generator.graphsafe_set_state(numbers)
            raise

    def seed(self, seed: int) -> None:
        # torch.manual_seed would go through all devices and backends: 20 us in place of 1.
        self.generator.manual_seed(seed)

    def replay(self) -> None:
        self.graph.replay()


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaGraph}  # by a device's type


class MicrobatchGraph:
    """One microbatch, captured. All that it reads and writes has fixed addresses."""

    def __init__(self, context: StepContext, reduction: ExactReduction, batch: Sequence[Tensor]) -> None:
        self.context, self.reduction = context, reduction
        self.inputs = [torch.empty_like(x, device=context.device) for x in batch]
        # Of the last replay, in the buckets' layout, so that adding them is one operation a bucket: 46 of the host's
        # for a microbatch of GPT-2 in place of 954. The next replay overwrites them.
        self.gradients: dict[Bucket, Tensor] = {bucket: bucket.empty() for bucket in reduction.buckets}
        self.recorder = RECORDERS[context.device.type](context.device)
        self.loss = self.count = torch.empty(0)

    def __call__(self, batch: Sequence[Tensor], seed: int) -> tuple[Tensor, Tensor]:
        """Compute a microbatch. batch: in the host's memory. seed: of its dropout. Returns loss and count."""
        self._load(batch)
        self.recorder.seed(seed)
        self.recorder.replay()
        # Copies: the next replay writes to the same places, and these are read at the step's end.
        return self.loss.clone(), self.count.clone()

    def add(self, microbatch: int, last: bool) -> None:
        """Add the gradients of the last replay to the sum. last: this microbatch is the process's last one."""
        self.reduction.accumulate(microbatch, last, self.gradients)

    def _load(self, batch: Sequence[Tensor]) -> None:
        for fixed, tensor in zip(self.inputs, batch, strict=True):
            fixed.copy_(tensor, non_blocking=True)

    def _compute(self) -> None:
        """Does what train_step does, and leaves the gradients in fixed places."""
        with self.reduction.writes_to(self.gradients):
            with self.context.autocast:
                loss, count = self.context.model(*self.inputs)
            self.context.update.scaled(loss).backward()
        # Not the loss itself, which would keep its autograd graph: the next forward would find the parameters' nodes
        # there, which belong to the stream of this one.
        self.loss, self.count = loss.detach(), count.detach()

    def capture(self, batch: Sequence[Tensor], seed: int, part: float | None, beside: int) -> None:
        """Capture the microbatch, and compare a replay with what is computed without a graph.

        part: of the device's free bytes, those of this process; None: try it in any case. beside: bytes that must
        remain for what is computed outside of the graph, besides another microbatch. Raises RuntimeError if it can't be
        captured, or has other bits.
        """
        recorder = self.recorder
        self._load(batch)

        def seeded() -> None:
            recorder.seed(seed)
            self._compute()

        needed = recorder.warm_up(seeded)
        # Evaluation, or the last microbatch of several processes, needs as much again as the graph keeps.
        if part is not None and (free := recorder.free() * part) < 2 * needed + beside:
            raise RuntimeError(
                f"it would keep {needed / 1e9:.1f} GB of this GPU, of which {free / 1e9:.1f} GB are free "
                f"(a smaller batch.micro_size needs less)"
            )
        expected = [tensor.clone() for tensor in self._outputs()]
        # With another seed than the replay below: a random number that is drawn on the host would be captured as a
        # constant, and is seen so.
        recorder.seed(seed ^ 1)
        recorder.capture(self._compute)
        recorder.seed(seed)
        recorder.replay()
        for found, wanted in zip(self._outputs(), expected, strict=True):
            if not torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)):
                raise RuntimeError("a replay of it has other bits")

    def _outputs(self) -> list[Tensor]:
        return [tensor.flatten() for tensor in (self.loss, self.count, *self.gradients.values())]


class Graphs:
    """Decides for each microbatch whether it is a replay. There is one graph at a time, of one shape."""

    def __init__(
        self, context: StepContext, reduction: ExactReduction, part: float | None, say: Callable[[str], None]
    ) -> None:
        """part: leave it if this part of the device's free memory is too little (see MicrobatchGraph.capture)."""
        self.context, self.reduction, self.part, self.say = context, reduction, part, say
        # Of the graph, or of the microbatch that could not be captured: it is not tried again.
        self.shapes: list[tuple[torch.Size, torch.dtype]] | None = None
        self.graph: MicrobatchGraph | None = None

    def of(self, batch: Sequence[Tensor], seed: int, last: bool) -> MicrobatchGraph | None:
        """The graph that computes this microbatch; None: it is computed without one. last: of this process's step.

        Captures it for the first microbatch of a shape. `batch.double_at` never returns to a shape.
        """
        # A replay fires no hooks of autograd, by which the exchange overlaps the backward of each process's last one.
        # So the order of the collectives is the same whether a process has a graph or not.
        if last and self.context.world.size > 1:
            return None
        shapes = [(tensor.shape, tensor.dtype) for tensor in batch]
        if shapes != self.shapes:
            self.shapes, self.graph = shapes, None  # its memory is free before the next one is captured
            self.graph = self._captured(batch, seed)
        return self.graph

    def _captured(self, batch: Sequence[Tensor], seed: int) -> MicrobatchGraph | None:
        """None if it can't be captured, which is said in one line."""
        world, reduction = self.context.world, self.reduction
        sums = 1 + math.ceil(math.log2(len(self.context.microbatches)))  # see ExactReduction
        beside = sums * sum(bucket.weights.nbytes for bucket in reduction.buckets)
        graph = MicrobatchGraph(self.context, reduction, batch)
        try:
            graph.capture(batch, seed, self.part, beside)
        except Exception as error:
            # Whatever it is: without a graph the microbatch is computed all the same, and a real fault shows there.
            reason = str(error).partition("\n")[0] or type(error).__name__
            of = f" of process {world.rank}" if world.rank else ""
            self.say(f"train.cuda_graphs: a microbatch{of} is computed without a graph: {reason}")
            return None
        if world.is_main:
            self.say("train.cuda_graphs: a microbatch is one CUDA graph")
        return graph
