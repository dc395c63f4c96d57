"""Read a file whose size is known, piece by piece, from a local disk or an object store."""

from collections.abc import Iterator

import torch

from mingpt.files.folder import Folder
from mingpt.files.localfile import read_into

RANGE_BYTES = 16 * 2**20  # of one request to an object store
RANGES = 4  # requested at a time: one connection to an object store is far slower than the network
PIECE_BYTES = 4 * 2**20  # of a local file


def read_pieces(folder: Folder, name: str, size: int) -> Iterator[memoryview]:
    """The bytes of a file in order. A piece is valid until the next one is asked for.

    Raises OSError, on a local disk also NotPlain and EOFError.
    """
    if folder.local:
        buffer = room_for(min(size, PIECE_BYTES))
        for start in range(0, size, PIECE_BYTES):
            yield from read_into(folder.root, name, buffer[: size - start], start)
    else:
        for start in range(0, size, RANGES * RANGE_BYTES):
            yield from _ranges(folder, name, range(start, min(size, start + RANGES * RANGE_BYTES), RANGE_BYTES), size)


def room_for(size: int) -> memoryview:
    """Not a bytearray, which is filled with zeros first, and not numpy's, which asks for slow huge pages."""
    return torch.empty(size, dtype=torch.uint8).numpy().data


def _ranges(folder: Folder, name: str, starts: range, size: int) -> Iterator[memoryview]:
    ends = [min(start + RANGE_BYTES, size) for start in starts]

    def read() -> list[bytes]:
        pieces = folder.fs.cat_ranges([folder.path(name)] * len(ends), list(starts), ends, on_error="raise")
        for start, end, piece in zip(starts, ends, pieces, strict=True):
            if len(piece) != end - start:  # the connection was cut, and the client has not noticed
                raise OSError(f"{name}: {len(piece)} bytes came in place of {end - start}")
        return [*pieces]

    for piece in folder.again(read):
        yield memoryview(piece)
