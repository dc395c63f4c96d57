"""This attempt's store: the processes find each other in it before there is a process group.

It is torch's TCPStore at MASTER_ADDR. Here it gets what torch does not give it: a limit for the first answer, an end
when the other machine falls silent, and keys that no attempt before has used.
"""

import errno
import json
import os
import threading
import time
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from mingpt.config.schema import WorldConfig
from mingpt.errors import TransientError, UserError
from mingpt.world import network
from mingpt.world.env import Env
from mingpt.world.rendezvous import open_store
from mingpt.world.world import Gather

LOOK_SECONDS = 0.01  # between two looks for a key


def open_attempt_store(env: Env, config: WorldConfig) -> tuple[dist.Store, dist.Store | None]:
    """This attempt's store, and a second connection for the watchdog; None in a world of one.

    Raises UserError or TransientError if the port is taken, TimeoutError if the others do not come.
    """
    if not env.launched:
        return dist.HashStore(), None
    shared = _connect(env, config.init_timeout_seconds)
    network.limit_silence(env.port, config.timeout_seconds)
    store = _own_namespace(shared, env.rank, env.size, config.init_timeout_seconds)
    _choose_interface(store, env)
    # One connection answers one request at a time: the watchdog's would wait behind a wait of the main thread's.
    return store, store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it


def _connect(env: Env, limit_seconds: float) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT."""
    host, port = env.host, env.port
    stores, errors = list[dist.Store](), list[Exception]()

    # Not by torch's env:// rendezvous: it prefixes every key with the agent's restart count, and agents that have
    # restarted their workers a different number of times would never meet.
    def connect() -> None:
        own = host if env.hosts else None
        several_nodes = env.local_size != env.size
        try:
            stores.append(open_store(host, port, own, several_nodes, timedelta(seconds=limit_seconds)))
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

    Rank 0 takes a new number from the store. Every other process writes a random name under its rank, and rank 0
    answers that name with the number.
    """
    # torchrun keeps one store through all its restarts (torch 2.13: TCPStore sharing, and always for static
    # rendezvous), and the keys of ended processes stay in it. A process that reads such a peer's address before the new
    # peer has overwritten it fails to connect: measured, most restarts needed two or three tries. The restart count
    # can't be the prefix, since it differs between nodes.
    deadline = time.monotonic() + limit_seconds

    def wait() -> None:
        time.sleep(LOOK_SECONDS)
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
                # The name may be one that an ended process has left: it is answered, too, and nobody reads that answer.
                # So rank 0 looks again until the living one has come by this number.
                elif store.check([f"mingpt/hello/{r}"]):
                    name = store.get(f"mingpt/hello/{r}").decode()
                    store.set(f"mingpt/answer/{name}", str(number))
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


def _choose_interface(store: dist.Store, env: Env) -> None:
    """Set NCCL's and gloo's variables to the interface that leads to the other nodes, unless the user has set them."""
    if env.local_size == env.size:  # a single node: no other machine can reach the ports that are opened on loopback
        os.environ.update(network.settings(network.interface_of("127.0.0.1"), os.environ))
        return
    address = network.address_towards(env.host)
    store.set(f"address/{env.rank}", address)
    if network.is_loopback(address):
        # On the head, MASTER_ADDR may resolve to loopback. There, take the route to any other node.
        of_all = [raw.decode() for raw in store.multi_get([f"address/{r}" for r in range(env.size)])]
        far = next((other for other in of_all if not network.is_loopback(other)), None)
        if far is None:
            return  # several launchers on one machine
        address = network.address_towards(far)
    os.environ.update(network.settings(network.interface_of(address), os.environ))


def gather_over(store: dist.Store, rank: int, size: int, limit_seconds: float) -> Gather:
    """What gathers values before there is a process group, which needs ranks."""
    rounds = count()  # keys stay in the store, so each round has its own

    def wait(keys: list[str]) -> None:
        try:
            store.wait(keys, timedelta(seconds=limit_seconds))
        except dist.DistStoreError as error:
            raise TimeoutError(
                f"process {rank} of {size} has waited {limit_seconds:g} s (world.init_timeout_seconds) for what the "
                f"others see of the run: look for the one whose log ends earlier, or raise the limit"
            ) from error

    def gather(value: Any) -> list[Any]:
        number = next(rounds)
        values = [f"told/{number}/{r}" for r in range(size)]
        store.set(values[rank], json.dumps(value))
        wait(values)
        answers = [json.loads(raw) for raw in store.multi_get(values)]
        # Nobody goes on before all have read: what was gathered may be a user error, with which a process ends, and so
        # its launcher, and the store if that is there. The others would end with 70, for want of the store.
        read = [f"read/{number}/{r}" for r in range(size)]
        store.set(read[rank], "")
        with suppress(dist.DistNetworkError):  # its host has gone on, and ended: so all have read
            wait(read)
        return answers

    return gather
