"""torchrun's two rendezvous backends, made safe: the store listens at one address, and its pickles are authenticated.

torch's own stores listen at every address of the machine, without a password. Its c10d rendezvous unpickles the value
of a key of the store (dynamic_rendezvous.py has the only `pickle.loads`), so whoever reaches the port can run code on
every node. Here that value carries an HMAC, made with a secret that the job's nodes share.

torchrun finds these backends as --rdzv-backend=mingpt-static and mingpt-c10d (plugins.py).
"""

import errno
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
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from mingpt.errors import UserError
from mingpt.world import network
from mingpt.world.platforms import PORT
from mingpt.world.secret import C10D, STATIC, signed, take_secret, verified


def open_store(
    host: str,
    port: int,
    own: str | None,
    several: bool,
    limit: timedelta,
    nodes: int | None = None,
    segment: int | None = None,
) -> TCPStore:
    """Connect to the TCPStore at host:port, and host it if `own` is given.

    own: the address at which this node hosts the store; None: another process hosts it. several: see network.bind.
    nodes: wait until so many have connected. segment: the most bytes of a TCP segment, in both directions.
    """
    waits = nodes is not None
    if own is None:
        return TCPStore(host, port, nodes, False, limit, wait_for_workers=waits)
    # torch would listen at every address of the machine. It takes a socket that listens already in place of that.
    listener = network.listen(own, port, several)
    if segment:  # set here, it also bounds what the other side sends
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
    # This process's own client connects to the address at which the socket listens: `own` may be behind NAT.
    address, port = listener.getsockname()[:2]
    if address in ("", "::", "0.0.0.0"):
        address = "localhost"
    return TCPStore(address, port, nodes, True, limit, wait_for_workers=waits, master_listen_fd=listener.detach())


class StaticRendezvous(StaticTCPRendezvous):
    """Runs torch's static rendezvous on a store that listens at one address. Port 0: the system chooses one."""

    def __init__(self, host: str, port: int, rank: int, nodes: int, run_id: str, timeout: int, own: str) -> None:
        super().__init__(host, port, rank, nodes, run_id, timeout)
        self.own = own

    def get_backend(self) -> str:
        return STATIC

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:  # torch's method opens one only if there is none
            own = self.own if self.rank == 0 else None
            several = self.world_size > 1
            store = open_store(self.master_addr, self.master_port, own, several, self.timeout, self.world_size)
            self._store, self.master_port = store, store.port
        return super().next_rendezvous()


class SignedBackend(RendezvousBackend):
    """Adds an HMAC to the state of a c10d rendezvous, and verifies it before torch unpickles the state.

    The rendezvous id is part of the HMAC's input, so state of another job with the same secret is refused, too.
    """

    def __init__(self, backend: RendezvousBackend, secret: str, run_id: str) -> None:
        self._backend, self._secret, self._context = backend, secret, f"{C10D} {run_id}"

    @property
    def name(self) -> str:
        return C10D

    def _verified(self, stored: tuple[bytes, Token] | None) -> tuple[bytes, Token] | None:
        """The state without its HMAC. Raises RendezvousStateError if that is wrong."""
        # Every way to torch's `pickle.loads` leads through here: what get_state reads, and what set_state gets back
        # when another node was faster.
        if stored is None:
            return None
        try:
            return verified(self._secret, self._context, stored[0]), stored[1]
        except ValueError as error:
            raise RendezvousStateError(str(error)) from error

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._verified(self._backend.get_state())

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        answer = self._backend.set_state(signed(self._secret, self._context, state), token)
        if answer is None:
            return None
        verified = self._verified(answer[:2])
        assert verified is not None
        return (*verified, answer[2])


def create_static(params: RendezvousParameters) -> RendezvousHandler:
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=PORT)
    rank = params.get_as_int("rank")
    timeout = params.get_as_int("timeout", 600)
    if rank is None or timeout is None:
        raise UserError(f"--rdzv-backend={STATIC} needs --rdzv-conf=rank=N, this node's number from 0")
    own = params.local_addr or host
    return StaticRendezvous(host, port, rank, params.max_nodes, params.run_id, timeout, own)


def create_c10d(params: RendezvousParameters) -> RendezvousHandler:
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=PORT)
    several = params.max_nodes > 1
    secret = take_secret(os.environ)  # workers would inherit it, and their children, and a user's code
    limit = timedelta(seconds=params.get_as_int("read_timeout", 60) or 60)
    # torchrun's guess compares names and addresses (pytorch#79388), which is wrong where a host's name means loopback.
    # So mingpt.launch says who hosts wherever it knows.
    is_host = params.get_as_bool("is_host")
    hosts = _is_this_machine(host) if is_host is None else is_host
    try:
        store = _host_or_connect(host, port, params.local_addr or host, several, limit, hosts, sure=is_host is not None)
    except (OSError, RuntimeError) as error:
        raise RendezvousConnectionError(str(error)) from error
    signed = SignedBackend(C10dRendezvousBackend(store, params.run_id), secret, params.run_id)
    return create_handler(store, signed, params)


def _host_or_connect(host: str, port: int, own: str, several: bool, limit: timedelta, hosts: bool, sure: bool) -> Store:
    """hosts: whether this node hosts the store. sure: False if that was guessed from the host's address."""
    if hosts:
        try:
            return open_store(host, port, own, several, limit)
        except OSError as error:
            # In use: another agent on this machine hosts the store, as in tests and on a node with two launchers.
            if sure or error.errno != errno.EADDRINUSE:
                raise
    return open_store(host, port, None, several, limit)


def _is_this_machine(host: str) -> bool:
    with suppress(OSError):
        return any(network.is_of_this_machine(str(a[4][0])) for a in socket.getaddrinfo(host, None))
    return False
