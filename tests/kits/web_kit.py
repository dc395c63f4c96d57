"""Web servers on loopback: a folder's is the smallest of object stores, read through fsspec's clients."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


class Quiet(BaseHTTPRequestHandler):
    """Answers requests, and prints nothing of them."""

    def log_message(self, *_: object) -> None:
        pass


class Folder(Quiet, SimpleHTTPRequestHandler):
    """Serves the files of a folder."""


@contextmanager
def serving(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """The server's URL. Its threads do not outlive the process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # seconds within which it notices the end
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def served(folder: Path, handler: type[Folder] = Folder) -> AbstractContextManager[str]:
    """The folder's URL."""
    return serving(partial(handler, directory=str(folder)))
