"""The nodes meet over torch's TCPStore at the head's port, which training will use later. Runs in a helper.

Each value carries an HMAC with the job's secret, if it has one: what a stranger writes into the store is not read.
Functions import torch themselves, in the helper: the process that started it imports this module, too, without torch.
"""

import json
import os
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from tempfile import NamedTemporaryFile
from typing import Any

from mingpt.config.schema import Config
from mingpt.errors import UserError
from mingpt.preflight.helper import Unreached
from mingpt.world.secret import SECRET, signed, verified

# Bytes of a TCP segment: preflight's own messages pass where an MTU black hole swallows large packets, and so the nodes
# can tell each other of it. Set on the listening socket, it bounds both directions.
SEGMENT = 400
SLACK_SECONDS = 5.0  # that a node waits longer for the head than the head waits for the nodes
LARGE, SMALL = 2**23, 2**15  # bytes of an all-reduce
SLOW_SECONDS = 0.1  # of a small all-reduce, after which no large one is tried
ROUNDS = 5  # of each
FABRIC_BYTES = 2**28  # of an all-reduce over NCCL
# What NCCL says of the networks that it finds, with their devices, and of the one that it takes. All else goes over
# TCP, and finds nothing wrong where NCCL misses InfiniBand or EFA (an image without libibverbs, a container without the
# devices): NCCL then takes TCP, many times slower, and says so in these lines alone.
NETWORK = re.compile(
    r"NCCL INFO (NET/\w+ ?: Using \[0\].*|NET/OFI Selected .*|Failed to open libibverbs.*|Using network .*)"
)


class Meeting:
    """The nodes that have met, as this one knows them."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.secret = os.environ.get(SECRET, "")
        self.turns = count()  # all nodes gather the same things in the same order
        self.here = set(range(1, size))  # on the head: the others that have answered so far

    def put(self, key: str, value: Any) -> None:
        self.store.set(key, signed(self.secret, f"preflight {key}", json.dumps(value).encode()))

    def get(self, key: str, seconds: float) -> Any:
        """Raises RuntimeError if it does not come, ValueError if it was not written with the secret."""
        self.store.wait([key], timedelta(seconds=max(0.01, seconds)))
        return json.loads(verified(self.secret, f"preflight {key}", self.store.get(key)))

    def gather(self, value: Any, seconds: float) -> list[Any]:
        """All-gather: the values by rank; None, from then on, for a node that has not answered within `seconds`."""
        turn = next(self.turns)
        if self.rank:
            self.put(f"{turn}/{self.rank}", value)
            return list(self.get(f"{turn}/all", seconds + SLACK_SECONDS))
        values: list[Any] = [value] + [None] * (self.size - 1)
        deadline = time.monotonic() + seconds  # for all of them together
        for rank in sorted(self.here):
            try:
                values[rank] = self.get(f"{turn}/{rank}", deadline - time.monotonic())
            except (RuntimeError, ValueError):
                # From now on nobody waits for it: each further turn would take all of its time again.
                self.here.remove(rank)
        self.put(f"{turn}/all", values)
        return values

    def number(self) -> int:
        """One that is free, for a node that has none."""
        rank = int(self.store.add("number", 1))
        if rank < self.size:
            return rank
        raise Unreached(f"{self.size} nodes have come already: start preflight again on all of them")


_met: Meeting


def about() -> dict[str, Any]:
    """What only torch knows of this node."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "visible": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "capability": None if cuda else torch.backends.cpu.get_cpu_capability(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    }


def meet(host: str, port: int, own: str | None, rank: int | None, size: int, seconds: float) -> int:
    """Host the store (own: this node's address), or connect to it; returns this node's rank.

    rank: None: the next that is free. Raises OSError if the port can't be opened, UserError if the head expects
    another number of nodes, or has another secret.
    """
    from mingpt.world.rendezvous import open_store

    global _met
    store = open_store(host, port, own, True, timedelta(seconds=max(1.0, seconds)), segment=SEGMENT)
    _met = Meeting(store, 0, size)
    if own is not None:
        _met.put("size", size)
        return 0
    try:
        expected = _met.get("size", SLACK_SECONDS)
    except ValueError as error:
        raise UserError(str(error)) from error
    if size != expected or not 0 < (rank or 1) < size:
        raise UserError(f"the head expects {expected} nodes, and this node {size}: give the same --nnodes to all nodes")
    _met.rank = rank or _met.number()
    return _met.rank


def gather(value: Any, seconds: float) -> list[Any]:
    return _met.gather(value, seconds)


def find_home(config: Config, hosts: list[str], seconds: float) -> tuple[list[str], list[str]]:
    """The hosts that will keep the snapshots; and what is to be said if one of them has the run alone.

    Found out as by training's processes, of which each node has one here. hosts: by rank. seconds: limit of each
    answer. Raises UserError for two runs under one name, and without the node that has the run; TransientError.
    """
    from mingpt.files.folder import alone
    from mingpt.tiers.home import HomeSearch

    # HomeSearch is training's own, and asks Env: here it is told of a world of one process a node.
    rank = str(_met.rank)
    os.environ.update(RANK=rank, GROUP_RANK=rank, WORLD_SIZE=str(_met.size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    search = HomeSearch(config)
    order = search.settle(lambda value: _met.gather(value, seconds))
    keepers = [hosts[order[rank]] for rank in search.home.snapshots]
    host = search.home.host
    return keepers, [alone(config.run.dir, host)] if host else []


def leave() -> None:
    """The head waits until the others have read all: its end is the store's."""
    left = _met.store.add("left", int(_met.rank > 0))
    deadline = time.monotonic() + SLACK_SECONDS
    while _met.rank == 0 and left < len(_met.here) and time.monotonic() < deadline:
        time.sleep(0.02)
        left = _met.store.add("left", 0)


def reduce(environment: dict[str, str], seconds: float) -> float:
    """All-reduces over gloo, one process a node: the bytes a second that each node sends."""
    import torch.distributed as dist

    os.environ.update(environment)
    store, limit = dist.PrefixStore("reduce", _met.store), timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=store, rank=_met.rank, world_size=_met.size, timeout=limit)
    return speed([SMALL, LARGE], "cpu")


def reduce_over_nccl() -> str:
    """All-reduces with one GPU of each node: how fast they are, and what NCCL says of networks.

    Called last of all, after `reduce`, whose environment stays: NCCL may hang, or take the process with it.
    """
    import torch.distributed as dist

    with NamedTemporaryFile("r") as log:
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": log.name}
        rate = speed([FABRIC_BYTES], "cuda", dist.new_group(backend="nccl")) / 1e9
        return f"{rate:.1f} GB/s from one GPU; {', '.join(NETWORK.findall(log.read()))}"


def speed(sizes: Sequence[int], device: str, group: Any = None) -> float:
    """The bytes a second that each node sends in an all-reduce of the last size that is not too slow, or the first."""
    import torch
    import torch.distributed as dist

    for number in sizes:
        buffer = torch.zeros(number // 4, device=device)
        times = list[float]()  # the least counts: others measure what else these machines do
        for _ in range(ROUNDS):
            begun = time.monotonic()
            dist.all_reduce(buffer, group=group)
            buffer[0].item()  # waits for a GPU
            times.append(time.monotonic() - begun)
        slowest = torch.tensor(min(times))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all nodes measure the same kinds
        if slowest > SLOW_SECONDS:  # with late or lost packets, TCP may take minutes for a large one
            break
    return 2 * (1 - 1 / _met.size) * number / slowest.item()
