"""How processes become a world, and how they leave it on every way out."""

import errno
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist

from mingpt.config.schema import WorldConfig
from mingpt.config.section import LARGEST
from mingpt.errors import CRASHED, UserError
from mingpt.world import network, slurm
from mingpt.world.rendezvous import open_store
from mingpt.world.world import World

LEAVE_SECONDS = 20  # for leaving the world after a failure; torchrun kills 30 s after it has seen one


def _announced(name: str, least: int, most: int, default: str = "") -> int:
    """A number out of the environment, where a launcher has put it, or a person."""
    text = os.environ.get(name, default)
    if not text.isdecimal() or not least <= int(text) <= most:
        raise UserError(
            f"{name}={text} in the environment: set a number from {least} to {most}, or start with torchrun"
        )
    return int(text)


def world_size() -> int:
    """The number of processes that the launcher announced; 1 without a launcher."""
    return _announced("WORLD_SIZE", 1, LARGEST, "1")


def speaks_for_node() -> bool:
    """Whether this process prints what all processes of a node would print alike (before there is a world)."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _device(config: WorldConfig, local_rank: int) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    index = 0 if slurm.hides_gpus(os.environ, visible) else local_rank
    if index >= visible:
        raise UserError(
            f"world.device={config.device}: process {local_rank} of this node needs a GPU of its own, but "
            f"{visible} are visible: start fewer processes a node, or use world.device=cpu",
            everywhere=not torch.cuda.is_available(),
        )
    return torch.device("cuda", index)


def _announced_store(limit_seconds: float) -> tuple[dist.Store, int, int]:
    """The store that the launcher's variables announce, this process's rank, and the number of processes.

    Not through torch's env:// rendezvous: with torchrun's own store that puts every key under the agent's restart
    count, and nodes whose agents have counted differently would never meet.
    """
    environment = os.environ
    if missing := [k for k in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if k not in environment]:
        raise UserError(
            f"RANK is set in the environment, but not {', '.join(missing)}: start with torchrun, or set all"
        )
    size = world_size()
    rank = _announced("RANK", 0, size - 1)
    host, port = environment["MASTER_ADDR"], _announced("MASTER_PORT", 1, 65535)
    # torchrun's agent may host the store itself.
    hosts = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    found, failed = list[dist.Store](), list[Exception]()

    def connect() -> None:
        try:
            own, several = host if hosts else None, environment.get("LOCAL_WORLD_SIZE") != str(size)
            found.append(open_store(host, port, own, several, timedelta(seconds=limit_seconds)))
        except Exception as error:
            failed.append(error)

    # In a thread: torch's limit does not cover the wait for the first words of a stranger that listens there.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(limit_seconds + 1)
    if found:
        return found[0], rank, size
    error = failed[0] if failed else None
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        raise UserError(f"MASTER_PORT={port} is in use on this machine: choose another port") from error
    if error and not isinstance(error, (dist.DistNetworkError, OSError)):
        raise error
    raise TimeoutError(
        f"process {rank} of {size} got no answer from MASTER_ADDR={host}, MASTER_PORT={port} within "
        f"{limit_seconds:g} s (world.init_timeout_seconds): is that machine up, and the port open?"
    ) from error


def _own_namespace(store: dist.Store, rank: int, size: int, limit_seconds: float) -> dist.Store:
    """The part of a store that this attempt shares with no earlier one; the processes find it by asking each other.

    torchrun keeps one store through all its restarts (torch 2.13: TCPStore sharing, and always for static rendezvous),
    and keys of the dead stay in it. A process that reads a dead peer's address before the living one has overwritten it
    fails to connect: measured, most restarts needed two or three tries. Restart counts can't serve as a namespace, they
    differ between nodes. So process 0 draws a number and tells it to whoever says hello with a name used only once;
    a dead one's hello is answered, too, and nobody reads the answer.
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


def _choose_interface(store: dist.Store, rank: int, size: int) -> None:
    """Tell NCCL and gloo which interface leads to the other nodes, unless the user has.

    With one node only, it is loopback's: they listen at its address, and nobody outside can talk to them.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        os.environ.update(network.settings(network.interface_of("127.0.0.1"), os.environ))
        return
    mine = network.address_towards(os.environ["MASTER_ADDR"])
    store.set(f"address/{rank}", mine)
    if network.is_loopback(mine):
        # On the head, its own name may mean loopback: there, the way to any other node is the one.
        others = [raw.decode() for raw in store.multi_get([f"address/{r}" for r in range(size)])]
        far = next((address for address in others if not network.is_loopback(address)), None)
        if far is None:
            return  # several launchers on one machine
        mine = network.address_towards(far)
    os.environ.update(network.settings(network.interface_of(mine), os.environ))


class Left(Exception):
    """This process leaves its world because of an error that has been told; `code` is what it ends with."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


def _limit_the_rest_of_life(seconds: float, code: int) -> None:
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


@contextmanager
def join(config: WorldConfig) -> Iterator[World]:
    """Join the world that torchrun's variables describe, or be a world of one; leave it on every way out.

    Raises UserError if the configured device or backend is not there.
    """
    environment = os.environ
    local_rank = _announced("LOCAL_RANK", 0, LARGEST, "0")
    device = _device(config, local_rank)
    backend = config.backend if config.backend != "auto" else ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type == "cpu":
        raise UserError("world.backend=nccl, but no GPU is visible: use world.backend=gloo, or auto")
    # On GPUs the small messages (JSON, agreement) go over gloo and gradients over nccl.
    backends = f"cpu:gloo,cuda:{backend}" if device.type == "cuda" else backend
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in environment:
        shared, rank, size = _announced_store(config.init_timeout_seconds)
        network.limit_silence(int(environment["MASTER_PORT"]), config.timeout_seconds)
        store = _own_namespace(shared, rank, size, config.init_timeout_seconds)
        _choose_interface(store, rank, size)
    else:
        store, rank, size = dist.HashStore(), 0, 1
    dist.init_process_group(
        backends, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=config.timeout_seconds)
    )
    if "RANK" in environment:  # again: nccl's watchdog has a connection of its own
        network.limit_silence(int(environment["MASTER_PORT"]), config.timeout_seconds)
    try:
        yield World(rank, size, local_rank, device, backend)
    except BaseException as error:
        # After a failure, nccl's own destruction may wait for peers that are gone.
        _limit_the_rest_of_life(LEAVE_SECONDS, error.code if isinstance(error, Left) else CRASHED)
        raise
    finally:
        # DDP sits in reference cycles. Alive, it keeps gloo's threads running into Python's shutdown, where one of them
        # asking for the interpreter lock ends the process with SIGABRT (measured: 8 of 20 short runs at world 4; with
        # this, 0 of 20).
        gc.collect()
        dist.destroy_process_group()
