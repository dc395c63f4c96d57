"""Reads files from web servers with a limit on bytes and time: a server may send too much, or for ever."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

PIECE_BYTES = 4 * 2**20


def is_web(fs: Any) -> bool:
    """Whether a file system from storage.open_fs is the one for http(s) URLs."""
    return "http" in fs.protocol


def read_stream(fs: Any, path: str, most: int) -> Iterator[bytes]:
    """At most `most` bytes of a file, piece by piece. The whole download must end within fs.seconds."""
    from aiohttp import ClientTimeout  # a dependency of fsspec's http client, which `fs` is

    # block_size=0: a stream. size: any number above 0, otherwise fsspec asks the server for the size first.
    stream = fs.open(path, "rb", block_size=0, size=1, timeout=ClientTimeout(total=fs.seconds))
    with closing(stream):
        left = most
        while left and (piece := stream.read(min(left, PIECE_BYTES))):
            left -= len(piece)
            yield piece
