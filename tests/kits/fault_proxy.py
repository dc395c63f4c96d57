"""A network that fails as told: a proxy on loopback between the clients of a store and its server.

Each connection carries one request, so a rule is about requests: which ones, by their first line, how many of them, and
what is done to them. As a program it can be killed: `fault_proxy.py PORT SERVER_PORT` drops the condition of each put.
"""

import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BUSY = b"<?xml version='1.0' encoding='UTF-8'?><Error><Code>SlowDown</Code><Message>Please wait.</Message></Error>"


@dataclass
class Rule:
    """What happens to the requests whose first line (`PUT /bucket/key?query HTTP/1.1`) has `match` in it, a pattern.

    times: to the first so many of them only. The base rule does nothing.
    """

    match: str = ""
    times: int | None = None
    status: int = 0  # an answer in the server's place
    late: float = 0  # the request reaches the server so many seconds later
    upload: int | None = None  # the connection breaks after so many bytes of the request's body
    download: int | None = None  # the connection ends after so many bytes of the answer's body; -1: before the answer
    silent: bool = False  # the request is taken, and never answered
    unconditional: bool = False  # the server does not hear the condition of a put, as one without conditional puts
    done: int = 0  # requests so far

    def takes(self, line: str) -> bool:
        if not re.search(self.match, line) or self.done == self.times:
            return False
        self.done += 1
        return True


class Exchange(BaseHTTPRequestHandler):
    """One request of a client, and its answer."""

    protocol_version = "HTTP/1.1"  # its clients ask whether they may go on and send the body
    server: "FaultProxy"

    def log_message(self, *_: object) -> None:
        pass

    def act(self) -> None:
        self.close_connection = True
        rule = next((rule for rule in self.server.rules if rule.takes(self.requestline)), Rule())
        if rule.upload is not None:
            self.rfile.read(rule.upload)
            # RST instead of FIN.
            return self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if rule.silent:
            self.rfile.read()  # until the client is gone
        elif rule.status:
            self.answer(rule.status, [("Content-Length", str(len(BUSY)))], BUSY)
        else:
            time.sleep(rule.late)
            self.forward(rule, body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = act

    def forward(self, rule: Rule, body: bytes) -> None:
        """To the server and back."""
        dropped = {"connection", "expect", *(["if-none-match"] if rule.unconditional else [])}
        server = HTTPConnection("127.0.0.1", self.server.target)
        server.request(
            self.command, self.path, body, {k: v for k, v in self.headers.items() if k.lower() not in dropped}
        )
        answer = server.getresponse()
        content = answer.read()
        server.close()
        if rule.download != -1:
            # What came in chunks ends with the connection.
            headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in ("connection", "transfer-encoding")]
            self.answer(answer.status, headers, content[: rule.download])

    def answer(self, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for header in (*headers, ("Connection", "close")):
            self.send_header(*header)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class FaultProxy(ThreadingHTTPServer):
    """Hands on to the server's port. The first rule that takes a request has it."""

    daemon_threads = True
    request_queue_size = 100

    def __init__(self, target: int, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Exchange)
        self.target = target
        self.rules: list[Rule] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def set(self, *rules: Rule) -> None:
        """These rules, and no others, from now on."""
        self.rules = list(rules)

    def shutdown_request(self, request: "socket.socket | tuple[bytes, socket.socket]") -> None:
        self.close_request(request)  # at once, which a reset is

    def handle_error(self, *_: object) -> None:
        """One side is gone, or the server was never there: so will the other be."""


if __name__ == "__main__":
    port, server_port = map(int, sys.argv[1:])
    FaultProxy(server_port, port).set(Rule(unconditional=True))
    threading.Event().wait()
