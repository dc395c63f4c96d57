"""Stream files from web servers. The server may be anybody's, and may send more than it announces, or never end."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

PIECE_BYTES = 4 * 2**20


def is_web(fs: Any) -> bool:
    """Whether a file system from storage.open_fs is for http(s) URLs."""
    return "http" in fs.protocol


def read_stream(fs: Any, path: str, most: int) -> Iterator[bytes]:
    """At most `most` bytes of a file, piece by piece. The whole transfer has the time limit of one call."""
    from aiohttp import ClientTimeout  # installed, since fsspec's http client needs it

    # block_size=0: stream. size: any number above 0, or fsspec would first ask the server for the size.
    stream = fs.open(path, "rb", block_size=0, size=1, timeout=ClientTimeout(total=fs.seconds))
    with closing(stream):
        left = most
        while left and (piece := stream.read(min(left, PIECE_BYTES))):
            left -= len(piece)
            yield piece
