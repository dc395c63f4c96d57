"""Vector quantization of image patches: k-means fits a codebook, and each patch becomes the number of its nearest code.

Codes and pixels are whole numbers from 0 to 255. Each sum and product of them stays below the largest whole number that
its floating-point type holds exactly, so the order of additions does not matter. The same images give the same codebook
and the same tokens, bit for bit, on any machine, with any BLAS and any number of threads.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mingpt.compute.batches import derive, permute

Pixels = NDArray[np.uint8]
FITTED_ON = 65_536  # patches in the sample; with more of them codes move by less than a grey level
ROUNDS = 20  # iterations of Lloyd's algorithm; the first ten give most of the gain
CHUNK = 16_384  # patches whose distances are in memory at a time


def patches_of(images: Pixels, size: int) -> Pixels:
    """Cut images (n, height, width, channels) into squares, row by row: (n, squares, size * size * channels).

    size: of a side in pixels; it divides height and width.
    """
    n, height, width, channels = images.shape
    cut = images.reshape(n, height // size, size, width // size, size, channels).swapaxes(2, 3)
    return np.ascontiguousarray(cut).reshape(n, -1, size * size * channels)


def images_of(patches: Pixels, shape: tuple[int, int, int], size: int) -> Pixels:
    """The inverse of `patches_of`. shape: (height, width, channels). Returns (n, height, width, channels)."""
    height, width, channels = shape
    cut = patches.reshape(-1, height // size, width // size, size, size, channels).swapaxes(2, 3)
    return np.ascontiguousarray(cut).reshape(-1, height, width, channels)


def nearest(patches: Pixels, codes: Pixels) -> NDArray[np.int64]:
    """The index (n,) of the code (codes, pixels) nearest to each patch (n, pixels); of two as near, the lower index."""
    # Compare |c|^2 - 2pc, which is |p - c|^2 without |p|^2: that is the same for all codes. Each term is below
    # 2 * pixels * 255^2, and float32 holds whole numbers exactly up to 2^24.
    exact: type[np.floating[Any]] = np.float32 if 2 * codes.shape[1] * 255**2 < 2**24 else np.float64
    table = codes.astype(exact)
    squares = (table * table).sum(1)
    out = np.empty(len(patches), dtype=np.int64)
    for start in range(0, len(patches), CHUNK):
        part = patches[start : start + CHUNK].astype(exact)
        out[start : start + CHUNK] = (squares - 2 * (part @ table.T)).argmin(1)
    return out


def fit(patches: Pixels, codes: int) -> Pixels:
    """Fit a codebook (codes, pixels) to patches (n, pixels): k-means (Lloyd's algorithm) on a sample of them.

    Equal patches count once. Otherwise most codes would go to the commonest patches, such as nearly black ones.
    """
    chosen = permute(np.arange(min(FITTED_ON, len(patches))), len(patches), derive("codebook"))
    different = np.unique(patches[chosen], axis=0)
    book = different[permute(np.arange(codes) % len(different), len(different), derive("first codes"))]
    for _ in range(ROUNDS):
        code = nearest(different, book)
        members = np.bincount(code, minlength=codes)
        sums = np.stack([np.bincount(code, column, codes) for column in different.T], 1).astype(np.int64)
        means = (2 * sums + members[:, None]) // np.maximum(2 * members[:, None], 1)  # rounded to whole numbers
        moved = np.where(members[:, None] > 0, means, book).astype(np.uint8)  # a code without patches stays
        if np.array_equal(moved, book):
            break
        book = moved
    return book
