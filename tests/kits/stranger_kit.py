"""A stranger in the network: finds what listens, and tries to run code through it, as anyone who reaches a port can."""

import pickle
import socket
from base64 import b64encode
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from tests.kits.node_kit import Node


def listeners(node: Node) -> set[tuple[str, int]]:
    """(address, port) of all that a node's processes listen at, over TCP."""
    found: set[tuple[str, int]] = set()
    for pid in node.processes():
        with suppress(psutil.Error):
            for c in psutil.Process(pid).net_connections("tcp"):
                if c.status == psutil.CONN_LISTEN:
                    found.add((c.laddr.ip, c.laddr.port))
    return found


def other_addresses(*own: str) -> list[str]:
    """This machine's IPv4 addresses but for `own`; one is on loopback, which every machine has."""
    there = [a.address for all_of_it in psutil.net_if_addrs().values() for a in all_of_it if a.family == socket.AF_INET]
    return [address for address in ["127.0.0.99", *there] if address not in own]


def reachable(address: str, port: int) -> bool:
    """Whether somebody accepts connections there."""
    with socket.socket() as s:
        s.settimeout(5)
        return s.connect_ex((address, port)) == 0


class Touch:
    """Unpickled, it makes a file: the proof that a stranger's code has run."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.proof,)


def poison(address: str, port: int, proof: Path) -> int:
    """Put a pickle that makes `proof` where torch's c10d rendezvous looks for its state; returns in how many places."""
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    states = [key for key in store.list_keys() if key.removeprefix("/").startswith("torch.rendezvous.")]
    for key in states:
        store.set(key.removeprefix("/"), b64encode(pickle.dumps(Touch(proof))).decode())
    return len(states)
