"""A webhook: an HTTP server that keeps what is posted, and answers as it is told to, or never."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from tests.kits.web_kit import Quiet, serving

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
    """Serve a webhook. status: of each answer. silent: it takes what is posted, and never answers."""
    found, over = Hook(status=status), Event()

    class Handler(Quiet):
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

    with serving(Handler) as url:
        found.url = url + SECRET
        try:
            yield found
        finally:
            over.set()
