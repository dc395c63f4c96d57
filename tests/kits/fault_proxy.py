"""A network and a store that fail as told: a proxy on loopback between the clients of a store and its server.

Each connection carries one request, so a rule is about requests: which ones, by their first line, how many of them, and
what is done to them.

    proxy.set(Rule("GET .*model", flip=True), Rule("PUT .*manifest", dropped=True))

| what may happen | rule |
|---|---|
| a bit flips on the way | `flip=True` |
| the store says yes, and has nothing | `dropped=True` |
| the store has done it, and says no | `status=500, done_first=True` |
| one object can't be had (an archive, a lost key) | `Rule("GET .*model", code="InvalidObjectState")` |
| the credentials end | `code="ExpiredToken"`, for all requests |
| a stale listing | `hidden="manifest"`: no key that has this in it is listed |
| a listing, or a body, that is cut off | `download=900`; with `whole=True` the proxy says that this was all |
| a connection breaks, or none answers | `upload=0`, `download=-1`, `silent=True` |
| a busy server, a slow one | `status=503`, `late=0.1` |
| a store without conditional puts | `unconditional=True` |

As a program it can be killed: `fault_proxy.py PORT SERVER_PORT` drops the condition of each put.
"""

import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import md5
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# What S3 answers, by the code of its error: its status, and its own words.
ANSWERS = {
    "SlowDown": (503, "Please wait."),
    "InternalError": (500, "We encountered an internal error. Please try again."),
    "ExpiredToken": (400, "The provided token has expired."),
    "AccessDenied": (403, "User is not authorized to perform: kms:Decrypt"),
    "InvalidObjectState": (403, "The operation is not valid for the object's storage class"),
}


@dataclass
class Rule:
    """What happens to the requests whose first line (`PUT /bucket/key?query HTTP/1.1`) has `match` in it, a pattern.

    times: to the first so many of them only. The base rule does nothing.
    """

    match: str = ""
    times: int | None = None
    code: str = ""  # of S3, one of ANSWERS: that answer in the server's place
    status: int = 0  # the same, with this status
    done_first: bool = False  # the server has had the request all the same
    dropped: bool = False  # the request is answered as if it had been done
    flip: bool = False  # a bit of the answer
    hidden: str = ""  # a pattern: keys that a listing of S3 does not show
    late: float = 0  # the request reaches the server so many seconds later
    upload: int | None = None  # the connection breaks after so many bytes of the request's body
    download: int | None = None  # the connection ends after so many bytes of the answer's body; -1: before the answer
    whole: bool = False  # the answer says that those bytes are all
    silent: bool = False  # the request is taken, and never answered
    unconditional: bool = False  # the server does not hear the condition of a put, as one without conditional puts
    done: int = 0  # requests so far

    def takes(self, line: str) -> bool:
        if not re.search(self.match, line) or self.done == self.times:
            return False
        self.done += 1
        return True


def flipped(content: bytes) -> bytes:
    """With one bit changed, in the middle."""
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] if content else content


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
        elif rule.dropped:
            self.answer(200, [("Content-Length", "0"), ("ETag", f'"{md5(body).hexdigest()}"')], b"")
        elif rule.code or rule.status:
            if rule.done_first:
                self.forwarded(rule, body)
            self.refuse(rule.code or "SlowDown", rule.status)
        else:
            time.sleep(rule.late)
            self.hand_back(rule, *self.forwarded(rule, body))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = act

    def forwarded(self, rule: Rule, body: bytes) -> tuple[HTTPResponse, bytes]:
        """What the server answers."""
        dropped = {"connection", "expect", *(["if-none-match"] if rule.unconditional else [])}
        server = HTTPConnection("127.0.0.1", self.server.target)
        server.request(
            self.command, self.path, body, {k: v for k, v in self.headers.items() if k.lower() not in dropped}
        )
        answer = server.getresponse()
        content = answer.read()
        server.close()
        return answer, content

    def hand_back(self, rule: Rule, answer: HTTPResponse, content: bytes) -> None:
        if rule.hidden:
            keys = rb"<Contents>(?:(?!</Contents>).)*</Contents>"
            content = re.sub(
                keys, lambda m: b"" if re.search(rule.hidden.encode(), m[0]) else m[0], content, flags=re.S
            )
        content = flipped(content) if rule.flip else content
        if rule.download != -1:
            # What came in chunks ends with the connection.
            gone = {"connection", "transfer-encoding", *(["content-length"] if rule.hidden or rule.whole else [])}
            headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in gone]
            self.answer(answer.status, headers, content[: rule.download])

    def refuse(self, code: str, status: int) -> None:
        usual, words = ANSWERS[code]
        body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{words}</Message></Error>"
        self.answer(status or usual, [("Content-Length", str(len(body)))], body.encode())

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
