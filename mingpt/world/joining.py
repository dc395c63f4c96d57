"""Joins the processes to a world (torch's process group), and leaves it on every way out."""

import errno
import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from mingpt.config.schema import WorldConfig
from mingpt.errors import CRASHED, TransientError, UserError, exit_now
from mingpt.world import network, slurm
from mingpt.world.env import Env
from mingpt.world.rendezvous import open_store
from mingpt.world.world import Progress, World

Gather = Callable[[Any], list[Any]]  # a JSON value of every process, by rank
LEAVE_SECONDS = 20  # limit for leaving the world after a failure; torchrun kills its workers after 30 s


def _device(config: WorldConfig, local_rank: int) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    visible = torch.cuda.device_count()
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
        self.config, self.local_rank, self._opened = config, local_rank, Future[torch.device]()
        if config.device != "cpu" and torch.cuda.device_count():
            threading.Thread(target=self._open, name="device", daemon=True).start()
        else:
            self._open()

    def _open(self) -> None:
        try:
            device = _device(self.config, self.local_rank)
            self._opened.set_result(torch.empty(1, device=device).device)
        except BaseException as error:
            self._opened.set_exception(error)

    def device(self) -> torch.device:
        """The device, ready to be used. Raises here, and nowhere else, what has failed in the thread."""
        limit = self.config.init_timeout_seconds
        if not wait([self._opened], limit).done:
            raise TimeoutError(
                f"the GPU has not answered within {limit:g} s (world.init_timeout_seconds): look at nvidia-smi"
            )
        return self._opened.result()


def _connect_store(env: Env, limit_seconds: float) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT.

    Not by torch's env:// rendezvous: it prefixes every key with the agent's restart count, and agents that have
    restarted their workers a different number of times would never meet.
    """
    host, port = env.host, env.port
    stores, errors = list[dist.Store](), list[Exception]()

    def connect() -> None:
        try:
            own, several = host if env.hosts else None, env.local_size != env.size
            stores.append(open_store(host, port, own, several, timedelta(seconds=limit_seconds)))
        except Exception as error:
            errors.append(error)

    # In a thread: if another program listens there and never answers, torch waits without a limit.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(limit_seconds + 1)
    if stores:
        return stores[0]
    error = errors[0] if errors else None
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        # torch's agent finds a free port and closes it again, seconds before this process listens there.
        if env.agent:
            raise TransientError(
                f"MASTER_PORT={port}: the launcher had found it free, and another program on this machine has taken it "
                "since: the next attempt gets another one"
            ) from error
        raise UserError(f"MASTER_PORT={port} is in use on this machine: choose another port") from error
    if error and not isinstance(error, (dist.DistNetworkError, OSError)):
        raise error
    raise TimeoutError(
        f"process {env.rank} of {env.size} got no answer from MASTER_ADDR={host}, MASTER_PORT={port} within "
        f"{limit_seconds:g} s (world.init_timeout_seconds): is that machine up, and the port open?"
    ) from error


def _own_namespace(store: dist.Store, rank: int, size: int, limit_seconds: float) -> dist.Store:
    """The store with a key prefix that only this attempt uses. The processes agree on the prefix through the store.

    torchrun keeps one store through all its restarts (torch 2.13: TCPStore sharing, and always for static rendezvous),
    and the keys of ended processes stay in it. A process that reads such a peer's address before the new peer has
    overwritten it fails to connect: measured, most restarts needed two or three tries. The restart count can't be the
    prefix, since it differs between nodes. So rank 0 takes a new number from the store. Every other process writes a
    random name under its rank, and rank 0 answers that name with the number. A name left by an ended process is
    answered, too; nobody reads that answer.
    """
    deadline = time.monotonic() + limit_seconds

    def wait() -> None:
        time.sleep(0.01)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"process {rank} of {size} has waited {limit_seconds:g} s (world.init_timeout_seconds) for the others: "
                f"look for the one whose log ends earlier, or raise the limit"
            )

    if rank == 0:
        number = store.add("mingpt/attempts", 1)
        missing = set(range(1, size))
        while missing:
            for r in sorted(missing):
                if store.check([f"mingpt/{number}/here/{r}"]):
                    missing.discard(r)
                elif store.check([f"mingpt/hello/{r}"]):
                    store.set(f"mingpt/answer/{store.get(f'mingpt/hello/{r}').decode()}", str(number))
            if missing:
                wait()
    else:
        name = uuid4().hex
        store.set(f"mingpt/hello/{rank}", name)
        while not store.check([f"mingpt/answer/{name}"]):
            wait()
        number = int(store.get(f"mingpt/answer/{name}"))
        store.set(f"mingpt/{number}/here/{rank}", "")
    return dist.PrefixStore(f"mingpt/{number}/", store)


def _gather_over(store: dist.Store, rank: int, size: int, limit_seconds: float) -> Gather:
    """What gathers values before there is a process group, which needs ranks."""
    rounds = count()

    def gather(value: Any) -> list[Any]:
        which = next(rounds)
        keys = [f"told/{which}/{r}" for r in range(size)]
        store.set(keys[rank], json.dumps(value))
        try:
            store.wait(keys, timedelta(seconds=limit_seconds))
        except dist.DistStoreError as error:
            raise TimeoutError(
                f"process {rank} of {size} has waited {limit_seconds:g} s (world.init_timeout_seconds) for what the "
                f"others see of the run: look for the one whose log ends earlier, or raise the limit"
            ) from error
        return [json.loads(raw) for raw in store.multi_get(keys)]

    return gather


def _choose_interface(store: dist.Store, env: Env) -> None:
    """Set NCCL's and gloo's variables to the interface that leads to the other nodes, unless the user has set them.

    With a single node, that is the loopback interface: no other machine can reach the ports opened there.
    """
    if env.local_size == env.size:
        os.environ.update(network.settings(network.interface_of("127.0.0.1"), os.environ))
        return
    mine = network.address_towards(env.host)
    store.set(f"address/{env.rank}", mine)
    if network.is_loopback(mine):
        # On the head, MASTER_ADDR may resolve to loopback. There, take the route to any other node.
        others = [raw.decode() for raw in store.multi_get([f"address/{r}" for r in range(env.size)])]
        far = next((address for address in others if not network.is_loopback(address)), None)
        if far is None:
            return  # several launchers on one machine
        mine = network.address_towards(far)
    os.environ.update(network.settings(network.interface_of(mine), os.environ))


def _each(world: World) -> int:
    """How many processes a node has, as the launchers say; 1 if they differ, or ranks are not in the nodes' order."""
    each = Env.read().local_size or 1
    told = world.gather([each, world.local_rank])
    regular = all(found == [each, rank % each] for rank, found in enumerate(told))
    return each if regular and world.size % each == 0 else 1


def by_nodes(world: World, each: int, limit_seconds: float) -> World:
    """The world with `inside` and `across`. each: processes of a node, which have consecutive ranks. Collective."""
    node, place = divmod(world.rank, each)
    if not 1 < each < world.size:
        return world

    def part(ranks: range) -> World:  # only its processes make a group
        group = dist.new_group(list(ranks), timedelta(seconds=limit_seconds), use_local_synchronization=True)
        Progress.groups.add(group)
        return replace(world, rank=ranks.index(world.rank), size=len(ranks), group=group)

    inside = part(range(node * each, (node + 1) * each))
    return replace(world, inside=inside, across=part(range(place, world.size, each)))


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


def _open_store(env: Env, config: WorldConfig) -> tuple[dist.Store, dist.Store | None]:
    """This attempt's store, and a second connection for the watchdog; None in a world of one."""
    if not env.launched:
        return dist.HashStore(), None
    shared = _connect_store(env, config.init_timeout_seconds)
    network.limit_silence(env.port, config.timeout_seconds)
    store = _own_namespace(shared, env.rank, env.size, config.init_timeout_seconds)
    _choose_interface(store, env)
    return store, store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it


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
    backend = config.backend if config.backend != "auto" else ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type == "cpu":
        raise UserError("world.backend=nccl, but no GPU is visible: use world.backend=gloo, or auto")
    # On GPUs, small messages (JSON, barriers) go over gloo, and gradients over nccl.
    backends = f"cpu:gloo,cuda:{backend}" if device.type == "cuda" else backend
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # The main thread gets a CUDA error, too, and tells it; nccl's thread would end the process first (SIGABRT).
        os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
        # Up to three communicators have work in flight. Every process starts it in one order, and with this the device
        # keeps to it (nccl#195; NCCL 2.26 and newer). ROCm's library crashes with it (aorta#512).
        if torch.version.hip is None:
            os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    store, own_connection = _open_store(env, config)
    if settle:
        rank = settle(_gather_over(store, rank, size, config.init_timeout_seconds)).index(rank)
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
