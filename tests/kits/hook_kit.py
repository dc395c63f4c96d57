"""A webhook: an HTTP server that keeps what is posted, and answers as it is told to, or never."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

SECRET = "/services/T00/hOoKsEcReT77"


@dataclass
class Hook:
    """posts: (path, body) of each. status: of the answers."""

    url: str = ""
    status: int = 200
    posts: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def bodies(self) -> list[dict[str, Any]]:
        assert all(path == SECRET for path, _ in self.posts)
        return [body for _, body in self.posts]

    def events(self) -> list[str]:
        return [body["event"] for body in self.bodies()]


@contextmanager
def hook(status: int = 200, silent: bool = False) -> Iterator[Hook]:
    found, over = Hook(status=status), Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            found.posts.append((self.path, json.loads(raw)))
            if silent:
                over.wait()
            self.send_response(found.status)
            if found.status == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found.url = f"http://127.0.0.1:{server.server_port}{SECRET}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield found
    finally:
        over.set()
        server.shutdown()
        server.server_close()
