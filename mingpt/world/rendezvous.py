"""torchrun's rendezvous with closed doors: a store that listens at one address, and no stranger's pickle.

torch's own listen at every address of a machine, and nothing on them asks for a password. Its c10d rendezvous
unpickles what stands under a key of the store (dynamic_rendezvous.py, the only `pickle.loads` on the way), so whoever
reaches that port runs code on every node. Here, what is unpickled carries an HMAC made with a secret that the job's
nodes share.
torchrun knows these as --rdzv-backend=mingpt-static and mingpt-c10d (plugins.py).
"""

import errno
import hashlib
import hmac
import os
import socket
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from mingpt import plugins
from mingpt.errors import UserError
from mingpt.world import network
from mingpt.world.platforms import PORT
from mingpt.world.secret import C10D, STATIC, take_secret

MAC_BYTES = hashlib.sha256().digest_size
REFUSED = (
    "the rendezvous' state was not written with this job's secret, and is not read: either this node has another "
    "MINGPT_RDZV_SECRET than the others, or a stranger reaches the rendezvous' port: close it to all but the nodes"
)


def open_store(
    host: str, port: int, own: str | None, several: bool, limit: timedelta, nodes: int | None = None
) -> TCPStore:
    """The store at host:port. own: where this node listens for it, if this node hosts it.

    nodes: wait until so many have come. several: they are on other machines.
    """
    waits = nodes is not None
    if own is None:
        return TCPStore(host, port, nodes, False, limit, wait_for_workers=waits)
    listener = network.listen(own, port, several)
    address, port = listener.getsockname()[:2]
    if address in ("", "::", "0.0.0.0"):
        address = "localhost"
    return TCPStore(address, port, nodes, True, limit, wait_for_workers=waits, master_listen_fd=listener.detach())


class Static(StaticTCPRendezvous):
    """torch's static rendezvous on a store that listens at one address; with one node, at a port that is free."""

    def __init__(self, host: str, port: int, rank: int, nodes: int, run_id: str, timeout: int, own: str) -> None:
        super().__init__(host, port, rank, nodes, run_id, timeout)
        self.own = own

    def get_backend(self) -> str:
        return STATIC

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:  # torch makes one of its own only where there is none
            own = self.own if self.rank == 0 else None
            several = self.world_size > 1
            store = open_store(self.master_addr, self.master_port, own, several, self.timeout, self.world_size)
            self._store, self.master_port = store, store.port
        return super().next_rendezvous()


class Sealed(RendezvousBackend):
    """A c10d rendezvous' state behind an HMAC: what does not carry it is never unpickled.

    The rendezvous' id goes into it, so that another job's state with the same secret is refused, too.
    """

    def __init__(self, backend: RendezvousBackend, secret: str, run_id: str) -> None:
        self._backend, self._key, self._context = backend, secret.encode(), f"{C10D} {run_id}\0".encode()

    @property
    def name(self) -> str:
        return C10D

    def _mac(self, state: bytes) -> bytes:
        return hmac.digest(self._key, self._context + state, "sha256")

    def _opened(self, found: tuple[bytes, Token] | None) -> tuple[bytes, Token] | None:
        if found is None:
            return None
        sealed, token = found
        mac, state = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(state)):
            raise RendezvousStateError(REFUSED)
        return state, token

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._opened(self._backend.get_state())

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        answer = self._backend.set_state(self._mac(state) + state, token)
        if answer is None:
            return None
        opened = self._opened(answer[:2])
        assert opened is not None
        return (*opened, answer[2])


def create_static(params: RendezvousParameters) -> RendezvousHandler:
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=PORT)
    rank, timeout = params.get_as_int("rank"), params.get_as_int("timeout", 600)
    if rank is None or timeout is None:
        raise UserError(f"--rdzv-backend={STATIC} needs --rdzv-conf=rank=N, this node's number from 0")
    own = params.local_addr or host
    return Static(host, port, rank, params.max_nodes, params.run_id, timeout, own)


def create_c10d(params: RendezvousParameters) -> RendezvousHandler:
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=PORT)
    several = params.max_nodes > 1
    secret = take_secret(os.environ)
    limit = timedelta(seconds=params.get_as_int("read_timeout", 60) or 60)
    told = params.get_as_bool("is_host")
    hosts = _means_this_machine(host) if told is None else told
    try:
        store = _open_or_find(host, port, params.local_addr or host, several, limit, hosts, sure=told is not None)
    except (OSError, RuntimeError) as error:
        raise RendezvousConnectionError(str(error)) from error
    sealed = Sealed(C10dRendezvousBackend(store, params.run_id), secret, params.run_id)
    return create_handler(store, sealed, params)


def _open_or_find(host: str, port: int, own: str, several: bool, limit: timedelta, hosts: bool, sure: bool) -> Store:
    if hosts:
        try:
            return open_store(host, port, own, several, limit)
        except OSError as error:
            if sure or error.errno != errno.EADDRINUSE:  # else another agent of this machine hosts it
                raise
    return open_store(host, port, None, several, limit)


def _means_this_machine(host: str) -> bool:
    with suppress(OSError):
        return any(network.is_of_this_machine(str(a[4][0])) for a in socket.getaddrinfo(host, None))
    return False


def register() -> None:
    """For mingpt.launch, which may run from a checkout that no entry point names."""
    rendezvous_handler_registry.register(STATIC, plugins.static())
    rendezvous_handler_registry.register(C10D, plugins.c10d())
