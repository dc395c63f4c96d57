"""What a web server sends, taken as it comes: it may be anybody's, and may send more than it has said, or for ever."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

PIECE_BYTES = 4 * 2**20


def is_web(fs: Any) -> bool:
    """Whether a file system of storage.open_fs is that of http(s) URLs."""
    return "http" in fs.protocol


def read_stream(fs: Any, path: str, most: int) -> Iterator[bytes]:
    """At most `most` bytes of a file, piece by piece. The whole of it ends within the limit of one call."""
    from aiohttp import ClientTimeout  # comes with fsspec's http client, which is there if `fs` is

    # block_size=0: as it comes. size: anything above 0, or the server would be asked for it once more.
    stream = fs.open(path, "rb", block_size=0, size=1, timeout=ClientTimeout(total=fs.seconds))
    with closing(stream):
        left = most
        while left and (piece := stream.read(min(left, PIECE_BYTES))):
            left -= len(piece)
            yield piece
