"""A network that fails as told: a proxy on loopback between the clients of a store and its server.

Each connection carries one request (both sides are told to close), so a rule is about requests: which ones, by their
first line, how many of them, and what is done to them.

As a program it can be killed: `fault_proxy.py HOST PORT SERVER_PORT RULE`, with the name of a rule for all requests.
"""

import asyncio
import random
import re
import socket
import struct
import sys
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from node_kit import free_port

PIECE = 1 << 16
SLOW_DOWN = b"<?xml version='1.0' encoding='UTF-8'?><Error><Code>%s</Code><Message>Please wait.</Message></Error>"


@dataclass
class Rule:
    """What happens to the requests whose first line (`PUT /bucket/key?query HTTP/1.1`) has `match` in it, a pattern.

    times: to the first so many of them only. share: to so large a share of them, by chance. The base rule does nothing.
    """

    match: str = ""
    times: int | None = None
    share: float = 1.0
    done: int = 0  # requests so far
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def takes(self, line: str) -> bool:
        if not re.search(self.match, line) or (self.times is not None and self.done >= self.times):
            return False
        if self.chance.random() >= self.share:
            return False
        self.done += 1
        return True

    async def act(self, exchange: "Exchange") -> None:
        await exchange.forward()


@dataclass
class Busy(Rule):
    """An answer in the server's place."""

    status: int = 503
    code: str = "SlowDown"

    async def act(self, exchange: "Exchange") -> None:
        body = SLOW_DOWN % self.code.encode() if "HEAD" not in exchange.line else b""
        head = f"HTTP/1.1 {self.status} Busy\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
        exchange.client[1].write(f"{head}Connection: close\r\n\r\n".encode() + body)
        await exchange.client[1].drain()
        await exchange.swallow()  # what the client is still sending: unread, it would make this a reset


@dataclass
class Late(Rule):
    """The request reaches the server after a while."""

    seconds: float = 0.2

    async def act(self, exchange: "Exchange") -> None:
        await asyncio.sleep(self.seconds)
        await exchange.forward()


@dataclass
class Reset(Rule):
    """The connection breaks after so many bytes of the request's body."""

    after: int = 0

    async def act(self, exchange: "Exchange") -> None:
        await exchange.forward(upload_limit=self.after)
        exchange.reset()


@dataclass
class Stall(Rule):
    """The request stays half sent for as long as the server lives."""

    after: int = 0

    async def act(self, exchange: "Exchange") -> None:
        await exchange.forward(upload_limit=self.after, until_server_ends=True)
        exchange.reset()


@dataclass
class Cut(Rule):
    """The connection ends after so many bytes of the answer's body. Below 0: before the answer."""

    after: int = 0

    async def act(self, exchange: "Exchange") -> None:
        await exchange.forward(download_limit=self.after)


@dataclass
class BlackHole(Rule):
    """The request is taken, and never answered."""

    async def act(self, exchange: "Exchange") -> None:
        await exchange.swallow()


@dataclass
class Denied(Busy):
    """A server that knows the client, and says no."""

    status: int = 403
    code: str = "AccessDenied"


@dataclass
class Unconditional(Rule):
    """The server does not hear the condition of a put, as one without conditional puts."""

    async def act(self, exchange: "Exchange") -> None:
        exchange.head = re.sub(rb"(?i)\r\nif-none-match:[^\r]*", b"", exchange.head)
        await exchange.forward()


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Exchange:
    """One request of a client. `head` has been read from it, and not been sent on."""

    client: Streams
    head: bytes
    port: int  # of the server

    @property
    def line(self) -> str:
        return self.head.partition(b"\r\n")[0].decode(errors="replace")

    async def forward(
        self, upload_limit: int | None = None, download_limit: int | None = None, until_server_ends: bool = False
    ) -> None:
        """To the server and back, up to a limit of body bytes in one direction."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(closing(self.head))
        up = asyncio.ensure_future(pump(self.client[0], writer, upload_limit))
        down = asyncio.ensure_future(self._answer(reader, download_limit))
        try:
            await (down if upload_limit is None else up)
            if until_server_ends:
                await asyncio.wait([down])
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, limit: int | None) -> None:
        answer = await reader.readuntil(b"\r\n\r\n")
        while answer.startswith(b"HTTP/1.1 100"):  # "go on and send the body"
            self.client[1].write(answer)
            answer = await reader.readuntil(b"\r\n\r\n")
        if limit is None or limit >= 0:
            self.client[1].write(closing(answer))
            await pump(reader, self.client[1], limit)

    async def swallow(self) -> None:
        while await self.client[0].read(PIECE):
            pass

    def reset(self) -> None:
        """RST instead of FIN."""
        sock = self.client[1].get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.client[1].transport.abort()


def closing(head: bytes) -> bytes:
    """A head that says that its connection ends with this exchange."""
    first, *rest = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    kept = [line for line in rest if not line.lower().startswith((b"connection:", b"keep-alive:"))]
    return b"\r\n".join([first, *kept, b"Connection: close", b"", b""])


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None) -> None:
    """Hand bytes on until the reader's side ends, or `limit` of them have been."""
    left = limit
    while left is None or left > 0:
        piece = await reader.read(PIECE if left is None else min(PIECE, left))
        if not piece:
            return
        writer.write(piece)
        await writer.drain()
        left = None if left is None else left - len(piece)


class FaultProxy:
    """Listens at `port` and hands on to the server's. The first rule that takes a request has it."""

    def __init__(self, server_port: int, port: int | None = None, host: str = "127.0.0.1") -> None:
        self.port, self.server_port = port or free_port(), server_port
        self.rules: list[Rule] = []
        self.lines: list[str] = []  # of all requests so far
        self._tasks = set[Any]()  # asyncio itself forgets those whose client is gone
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, host, self.port, limit=1 << 20))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(100)

    def set(self, *rules: Rule) -> None:
        """These rules, and no others, from now on."""
        self.rules = list(rules)

    def count(self, match: str) -> int:
        """How many requests there were with this pattern in their first line."""
        return sum(bool(re.search(match, line)) for line in self.lines)

    def close(self) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(100)
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(task := asyncio.current_task())
        try:
            exchange = Exchange((reader, writer), await reader.readuntil(b"\r\n\r\n"), self.server_port)
            self.lines.append(exchange.line)
            rule = next((rule for rule in self.rules if rule.takes(exchange.line)), Rule())
            await rule.act(exchange)
        except (OSError, asyncio.IncompleteReadError):
            pass  # one side is gone, or the server was never there: so will the other be
        finally:
            writer.close()
            self._tasks.discard(task)


if __name__ == "__main__":
    host, port, server_port, rule = sys.argv[1:]
    FaultProxy(int(server_port), int(port), host).set(globals()[rule]())
    threading.Event().wait()
