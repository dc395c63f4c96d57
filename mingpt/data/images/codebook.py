"""Patches of images as numbers: a codebook fitted to them by k-means, and the nearest code of each patch.

Codes and pixels are whole numbers from 0 to 255, and every sum and product of them stays below the largest whole number
that its floating-point type holds exactly. So neither the order of additions nor the machine matters: the same images
give the same codebook and the same tokens, bit for bit, with any BLAS and any number of threads.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mingpt.compute.batches import derive, permute

Pixels = NDArray[np.uint8]
FITTED_ON = 65_536  # patches; more of them move the codes by less than a grey level
ROUNDS = 20  # of Lloyd's algorithm; most of what it gains comes in the first ten
CHUNK = 16_384  # patches whose distances are in memory at a time


def patches_of(images: Pixels, size: int) -> Pixels:
    """(n, height, width, channels) cut into squares of `size`, row by row: (n, squares, size * size * channels)."""
    n, height, width, channels = images.shape
    cut = images.reshape(n, height // size, size, width // size, size, channels).swapaxes(2, 3)
    return np.ascontiguousarray(cut).reshape(n, -1, size * size * channels)


def images_of(patches: Pixels, shape: tuple[int, int, int], size: int) -> Pixels:
    """What `patches_of` has cut, put together: (n, height, width, channels)."""
    height, width, channels = shape
    cut = patches.reshape(-1, height // size, width // size, size, size, channels).swapaxes(2, 3)
    return np.ascontiguousarray(cut).reshape(-1, height, width, channels)


def nearest(patches: Pixels, codes: Pixels) -> NDArray[np.int64]:
    """The index of the nearest code of each patch (n, pixels) -> (n,); the lower of two that are as near."""
    # |p - c|^2 without |p|^2, which is the same for all codes; its parts are below 2 * pixels * 255^2.
    exact: type[np.floating[Any]] = np.float32 if 2 * codes.shape[1] * 255**2 < 2**24 else np.float64
    table = codes.astype(exact)
    squares = (table * table).sum(1)
    out = np.empty(len(patches), dtype=np.int64)
    for start in range(0, len(patches), CHUNK):
        part = patches[start : start + CHUNK].astype(exact)
        out[start : start + CHUNK] = (squares - 2 * (part @ table.T)).argmin(1)
    return out


def fit(patches: Pixels, codes: int) -> Pixels:
    """A codebook (codes, pixels) for patches (n, pixels): k-means over the different ones among a sample of them.

    Equal patches count once, or most codes of a mostly black data set would be kinds of black.
    """
    chosen = permute(np.arange(min(FITTED_ON, len(patches))), len(patches), derive("codebook"))
    different = np.unique(patches[chosen], axis=0)
    book = different[permute(np.arange(codes) % len(different), len(different), derive("first codes"))]
    for _ in range(ROUNDS):
        code = nearest(different, book)
        members = np.bincount(code, minlength=codes)
        sums = np.stack([np.bincount(code, column, codes) for column in different.T], 1).astype(np.int64)
        means = (2 * sums + members[:, None]) // np.maximum(2 * members[:, None], 1)  # rounded to whole numbers
        moved = np.where(members[:, None] > 0, means, book).astype(np.uint8)  # a code that nobody needs stays
        if np.array_equal(moved, book):
            break
        book = moved
    return book
