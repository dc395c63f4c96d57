"""Read a file whose size is known, whole or piece by piece, from a local disk, a web server or an object store.

A piece is valid until the next one is asked for: the pieces of one file share a buffer.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch

from mingpt.errors import Damaged
from mingpt.folder import Folder
from mingpt.localfile import read_into

RANGE_BYTES = 16 * 2**20  # of one request to an object store
PIECE_BYTES = 4 * 2**20  # of a local file, or of what comes from a web server


def read_whole(folder: Folder, name: str, size: int) -> memoryview:
    """Raises OSError, on a local disk also NotPlain and EOFError, for a web server also Damaged."""
    content = _buffer(size)
    for _ in _fill(folder, name, content, 0, size):
        pass
    return content


def read_pieces(folder: Folder, name: str, size: int) -> Iterator[memoryview]:
    """The same file with little memory, whatever its size. Raises as `read_whole`."""
    if _is_web(folder):
        yield from _web_pieces(folder, name, size)
        return
    most = PIECE_BYTES if folder.local else RANGE_BYTES
    buffer = _buffer(min(size, most))
    for start in range(0, size, most):
        yield from _fill(folder, name, buffer[: size - start], start, size)


def _buffer(size: int) -> memoryview:
    """Not a bytearray, which is filled with zeros first, and not numpy's, which asks for slow huge pages."""
    return torch.empty(size, dtype=torch.uint8).numpy().data


def _fill(folder: Folder, name: str, into: memoryview, start: int, size: int) -> Iterator[memoryview]:
    """Fill `into` with a file's bytes from `start` on. Yields each piece of it that is filled."""
    if folder.local:
        yield from read_into(folder.root, name, into, start)
    elif _is_web(folder):
        end = 0
        for piece in _web_pieces(folder, name, size):
            into[end : end + len(piece)] = piece
            end += len(piece)
    else:
        _read_ranges(folder, name, into, start)
        yield into


def _is_web(folder: Folder) -> bool:
    return "http" in folder.fs.protocol


def _web_pieces(folder: Folder, name: str, size: int) -> Iterator[memoryview]:
    """One request: a web server may answer a range with the whole file. The server may be anybody's: it may also send
    more than it announces, or never end. The whole transfer has the time limit of one call.
    """
    from aiohttp import ClientTimeout  # installed, since fsspec's http client needs it

    # block_size=0: stream. size: any number above 0, or fsspec would first ask the server for the size.
    timeout, end = ClientTimeout(total=folder.fs.seconds), 0
    stream = folder.fs.open(folder.path(name), "rb", block_size=0, size=1, timeout=timeout)
    with closing(stream):
        while end <= size and (piece := stream.read(min(size + 1 - end, PIECE_BYTES))):
            end += len(piece)
            if end > size:
                raise Damaged(f"{Path(name).name} has more than the {size} bytes that its server announces")
            yield memoryview(piece)
    if end != size:  # the connection was cut
        raise OSError(f"{name}: {end} bytes came in place of {size}")


def _read_ranges(folder: Folder, name: str, into: memoryview, first: int) -> None:
    """Fill `into` with the bytes from `first` on.

    Several ranges are requested at a time, since one connection to an object store is far slower than the network.
    """
    starts = range(first, first + len(into), RANGE_BYTES)
    ends = [min(start + RANGE_BYTES, first + len(into)) for start in starts]
    pieces = folder.fs.cat_ranges([folder.path(name)] * len(ends), list(starts), ends, on_error="raise")
    for start, end, piece in zip(starts, ends, pieces, strict=True):
        if len(piece) != end - start:  # the connection was cut, and the client has not noticed
            raise OSError(f"{name}: {len(piece)} bytes came in place of {end - start}")
        into[start - first : end - first] = piece
