"""Read a file whose size is known, whole or piece by piece, from a local disk, a web server or an object store.

A piece is valid until the next one is asked for: the pieces of one file share a buffer.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mingpt.errors import Damaged
from mingpt.plainfile import read_into
from mingpt.storage import is_local
from mingpt.webfile import is_web, read_stream

RANGE_BYTES = 16 * 2**20  # of one request to an object store
PIECE_BYTES = 4 * 2**20  # of a local file


def read_whole(fs: Any, path: str, size: int) -> memoryview:
    """Raises OSError, on a local disk also NotPlain and EOFError, for a web server also Damaged."""
    content = _buffer(size)
    if is_local(fs):
        for _ in read_into(path, content):
            pass
    elif is_web(fs):
        end = 0
        for piece in _web_pieces(fs, path, size):
            content[end : end + len(piece)] = piece
            end += len(piece)
    else:
        _read_ranges(fs, path, content)
    return content


def read_pieces(fs: Any, path: str, size: int) -> Iterator[memoryview]:
    """The same file with little memory, whatever its size. Raises as `read_whole`."""
    if is_web(fs):
        yield from _web_pieces(fs, path, size)
        return
    most = PIECE_BYTES if is_local(fs) else RANGE_BYTES
    buffer = _buffer(min(size, most))
    for start in range(0, size, most):
        piece = buffer[: size - start]
        if is_local(fs):
            yield from read_into(path, piece, start)
        else:
            _read_ranges(fs, path, piece, start, whole=size <= most)
            yield piece


def _buffer(size: int) -> memoryview:
    """Not a bytearray, which is filled with zeros first, and not numpy's, which asks for slow huge pages."""
    return torch.empty(size, dtype=torch.uint8).numpy().data


def _web_pieces(fs: Any, path: str, size: int) -> Iterator[memoryview]:
    """One request: a web server may answer a range with the whole file. It may also send more than it announced."""
    end = 0
    for piece in read_stream(fs, path, size + 1):
        end += len(piece)
        if end > size:
            raise Damaged(f"{Path(path).name} has more than the {size} bytes that its server announces")
        yield memoryview(piece)
    if end != size:  # the connection was cut
        raise OSError(f"{path}: {end} bytes came in place of {size}")


def _read_ranges(fs: Any, path: str, into: memoryview, first: int = 0, whole: bool = True) -> None:
    """Fill `into` with the bytes from `first` on. whole: these are all bytes of the file.

    Several ranges are requested at a time, since one connection to an object store is far slower than the network.
    """
    starts = range(first, first + len(into), RANGE_BYTES)
    ends = [min(start + RANGE_BYTES, first + len(into)) for start in starts]
    if whole and len(starts) == 1:
        pieces = [fs.cat_file(path)]
    else:
        pieces = fs.cat_ranges([path] * len(ends), list(starts), ends, on_error="raise")
    for start, end, piece in zip(starts, ends, pieces, strict=True):
        if len(piece) != end - start:  # the connection was cut, and the client has not noticed
            raise OSError(f"{path}: {len(piece)} bytes came in place of {end - start}")
        into[start - first : end - first] = piece
