"""Joins the processes to a world (torch's process group), and leaves it on every way out."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from mingpt.config.schema import WorldConfig
from mingpt.errors import CRASHED, UserError, exit_now
from mingpt.world import network, slurm
from mingpt.world.attempt_store import gather_over, open_attempt_store
from mingpt.world.env import Env
from mingpt.world.world import Gather, Progress, World

LEAVE_SECONDS = 20  # limit for leaving the world after a failure; torchrun kills its workers after 30 s


@contextmanager
def join(
    config: WorldConfig, device: torch.device | None = None, settle: Callable[[Gather], list[int]] | None = None
) -> Iterator[World]:
    """Join the world that torchrun's variables describe, or a world of one; leave it on every way out.

    device: of an Opening, if there is one already. settle: gathers what it needs from all processes, and returns the
    order in which they get their ranks: the launcher's rank of each. RANK is the new one from then on.

    Raises UserError if the configured device or backend is not available, or a variable is wrong; TimeoutError if the
    other processes do not come within world.init_timeout_seconds; TransientError if the launcher's port was taken.
    """
    env = Env.read(check=True)
    rank, size = env.rank, env.size
    device = device or _device(config, env.local_rank)
    backend = _backend(config, device)
    # On GPUs, small messages (JSON, barriers) go over gloo, and gradients over nccl.
    backends = f"cpu:gloo,cuda:{backend}" if device.type == "cuda" else backend
    store, own_connection = open_attempt_store(env, config)
    if settle:
        # Whoever holds the run on its disk gets rank 0, which writes for all. Nothing else depends on ranks, so they
        # may be given anew; only before there is a process group, whose connections are made by rank.
        order = settle(gather_over(store, rank, size, config.init_timeout_seconds))
        rank = order.index(rank)
        if env.launched:
            os.environ["RANK"] = str(rank)
    dist.init_process_group(
        backends, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=config.timeout_seconds)
    )
    if env.launched:  # again, for the connection that nccl's watchdog has opened
        network.limit_silence(env.port, config.timeout_seconds)
    end: threading.Timer | None = None
    try:
        world = World(rank, size, env.local_rank, device, backend, store=own_connection)
        yield by_nodes(world, _each(world), config.timeout_seconds)
    except BaseException as error:
        # Leaving may wait for peers that wait for this process. The timer ends it with the code it asks for.
        end = _exit_after(LEAVE_SECONDS, error.code if isinstance(error, ReportedFailure) else CRASHED)
        raise
    finally:
        # What holds a process group may be in reference cycles. While it lives, gloo's threads run on into Python's
        # shutdown, and a thread that asks for the interpreter lock there ends the process with SIGABRT (measured with
        # torch's DDP: 8 of 20 short runs at world 4; with this line, 0 of 20).
        gc.collect()
        # After a failure, destroying nccl's group would wait for peers, which wait for this process.
        if not (end and backend == "nccl" and size > 1):
            dist.destroy_process_group()
        if end and size == 1:  # it has left: a caller that catches the error may go on
            end.cancel()


class ReportedFailure(Exception):
    """An error that has been printed already. `code`: the exit code that it asks for."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


def _exit_after(seconds: float, code: int) -> threading.Timer:
    timer = threading.Timer(seconds, exit_now, [code])
    timer.daemon = True
    timer.start()
    return timer


# --- the device, and what sends from it ---


def _device(config: WorldConfig, local_rank: int) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    # Slurm can show each task its own GPU alone (--gpus-per-task), which has number 0 then, whatever the local rank.
    index = 0 if slurm.hides_gpus(os.environ, visible) else local_rank
    if config.backend == "gloo" and visible:  # only NCCL takes each GPU once
        index %= visible
    if index >= visible:
        share = "world.backend=gloo, with which processes share GPUs, or " if visible else ""
        raise UserError(
            f"world.device={config.device}: process {local_rank} of this node needs a GPU of its own, but "
            f"{visible} are visible: start fewer processes a node, or use {share}world.device=cpu",
            everywhere=not torch.cuda.is_available(),
        )
    return torch.device("cuda", index)


class Opening:
    """Opens this process's device in a thread while other things start: CUDA takes up to a second for its context.

    Without a GPU there is no thread.
    """

    def __init__(self, config: WorldConfig, local_rank: int) -> None:
        self.config, self.local_rank = config, local_rank
        self._opened = Future[torch.device]()
        if config.device != "cpu" and torch.cuda.device_count():
            threading.Thread(target=self._open, name="device", daemon=True).start()
        else:
            self._open()

    def _open(self) -> None:
        try:
            device = _device(self.config, self.local_rank)
            self._opened.set_result(torch.empty(1, device=device).device)  # allocates: that makes the context
        except BaseException as error:
            self._opened.set_exception(error)

    def device(self) -> torch.device:
        """The device, ready to be used. Raises here, and nowhere else, what has failed in the thread."""
        limit = self.config.init_timeout_seconds
        # A GPU that has fallen off its bus may never answer, and the driver's call hears no signal.
        if not wait([self._opened], limit).done:
            raise TimeoutError(
                f"the GPU has not answered within {limit:g} s (world.init_timeout_seconds): look at nvidia-smi"
            )
        return self._opened.result()


def _backend(config: WorldConfig, device: torch.device) -> str:
    """The backend for gradients, nccl or gloo, with this process's device set and its variables."""
    backend = config.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type == "cpu":
        raise UserError("world.backend=nccl, but no GPU is visible: use world.backend=gloo, or auto")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # The main thread gets a CUDA error, too, and tells it; nccl's thread would end the process first (SIGABRT).
        os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
        # Up to three communicators have work in flight. Every process starts it in one order, and with this the device
        # keeps to it (nccl#195; NCCL 2.26 and newer). ROCm's library crashes with it (aorta#512).
        if torch.version.hip is None:
            os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    return backend


# --- groups by nodes ---


def _each(world: World) -> int:
    """How many processes a node has, as the launchers say; 1 if they differ, or ranks are not in the nodes' order."""
    each = Env.read().local_size or 1
    # Asked of all: each launcher knows its own node alone, and ranks that `settle` has moved may break the order.
    said = world.gather([each, world.local_rank])
    regular = all(answer == [each, rank % each] for rank, answer in enumerate(said))
    return each if regular and world.size % each == 0 else 1


def by_nodes(world: World, each: int, limit_seconds: float) -> World:
    """The world with `inside` and `across`. each: processes of a node, which have consecutive ranks. Collective."""
    node, place = divmod(world.rank, each)
    if not 1 < each < world.size:
        return world

    def part(ranks: range) -> World:
        # Only its processes make a group: with all of them, as torch does it else, each would make those of all nodes.
        group = dist.new_group(list(ranks), timedelta(seconds=limit_seconds), use_local_synchronization=True)
        Progress.groups.add(group)
        return replace(world, rank=ranks.index(world.rank), size=len(ranks), group=group)

    inside = part(range(node * each, (node + 1) * each))
    across = part(range(place, world.size, each))
    return replace(world, inside=inside, across=across)
