"""Codebooks of patches: exact on any machine, near what they stand for; and pictures as PNG files."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mingpt.data.images.codebook import fit, images_of, nearest, patches_of
from mingpt.data.images.imagetokens import ImageTokens
from mingpt.data.images.pictures import GAP, draw, grid, png
from mingpt.data.vocabulary import vocabulary_of
from mingpt.errors import UserError
from mingpt.model.gpt2 import GPT, GPTConfig


def some(*shape: int, seed: int = 0, levels: int = 256) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, levels, shape, dtype=np.uint8)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_images_come_back_from_their_patches(size: int) -> None:
    images = some(3, 8, 4, 3)
    patches = patches_of(images, size)
    assert patches.shape == (3, 32 // size**2, size**2 * 3)
    assert np.array_equal(images_of(patches, (8, 4, 3), size), images)
    assert np.array_equal(patches[1, 0].reshape(size, size, 3), images[1, :size, :size])


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 300), st.sampled_from([2, 5, 256]), st.integers(0, 99))
def test_the_nearest_code_is_the_first_of_the_nearest(pixels: int, levels: int, seed: int) -> None:
    """Whatever the number of pixels, sums are whole numbers: compared with integers that cannot overflow."""
    patches, codes = some(20, pixels, seed=seed, levels=levels), some(9, pixels, seed=seed + 1, levels=levels)
    differences = patches[:, None].astype(np.int64) - codes[None].astype(np.int64)
    assert nearest(patches, codes).tolist() == (differences**2).sum(2).argmin(1).tolist()


def test_a_fit_finds_the_groups_that_there_are() -> None:
    centres = np.array([[0, 0], [200, 0], [0, 200], [200, 200]], dtype=np.uint8)
    patches = np.concatenate([c + some(50, 2, seed=i, levels=9) for i, c in enumerate(centres)])
    book = fit(patches, 16)
    error = patches.astype(int) - book[nearest(patches, book)].astype(int)
    assert np.abs(error).max() <= 8


def test_a_fit_is_pinned() -> None:
    """A release that fits otherwise must say so: its tokens do not fit older snapshots."""
    book = fit(some(500, 4, levels=64), 8)
    assert zlib.crc32(book.tobytes()) == 673405693


def test_more_codes_than_patches_are_no_harm() -> None:
    assert fit(np.zeros((5, 4), np.uint8), 3).tolist() == [[0] * 4] * 3


def tokens(channels: int = 1) -> ImageTokens:
    return ImageTokens((4, 4, channels), 2, 3, some(5, 4 * channels).tobytes())


def test_a_vocabulary_of_images_survives_json() -> None:
    again = vocabulary_of(tokens().to_json())
    assert again == tokens()
    assert (again.size, tokens().codes, tokens().unknown, tokens().per_image) == (9, 5, 8, 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"codebook": "abc"},
        {"codebook": ""},
        {"codebook": 5},
        {"patch": 3},
        {"patch": 0},
        {"shape": [4, 4]},
        {"classes": 0},
    ],
)
def test_a_damaged_one_is_a_mistake(changes: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"^a damaged vocabulary of the kind 'image'"):
        vocabulary_of(tokens().to_json() | changes)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_drawing_is_one_of_codes_and_a_function_of_the_seed(channels: int) -> None:
    kinds = tokens(channels)
    model = GPT(GPTConfig(kinds.size, 5, 1, 1, 8)).eval()
    images = draw(model, kinds, 2, top_k=4, seed=3)
    assert images.shape == (3, 2, 4, 4, channels)
    flat = images.reshape(-1, 4, 4, channels)
    assert np.array_equal(kinds.decode(kinds.encode(flat)), flat)
    assert np.array_equal(images, draw(model, kinds, 2, top_k=4, seed=3))
    assert not np.array_equal(images, draw(model, kinds, 2, top_k=4, seed=4))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grid_is_a_png_with_each_image_in_its_place(channels: int) -> None:
    images = some(2, 3, 5, 4, channels)
    picture = grid(images)
    assert picture.shape == (2 * 5 + GAP, 3 * 4 + 2 * GAP, channels)
    assert np.array_equal(picture[5 + GAP :, 4 + GAP : 8 + GAP], images[1, 1])
    file = png(picture)
    assert file.startswith(b"\x89PNG\r\n\x1a\n")
    at, content = 8, b""
    while at < len(file):
        (length,) = struct.unpack(">I", file[at : at + 4])
        kind, body = file[at + 4 : at + 8], file[at + 8 : at + 8 + length]
        assert struct.unpack(">I", file[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + body),)
        if kind == b"IHDR":
            assert struct.unpack(">IIBBBBB", body) == (picture.shape[1], picture.shape[0], 8, channels - 1, 0, 0, 0)
        content += body if kind == b"IDAT" else b""
        at += 12 + length
    rows = np.frombuffer(zlib.decompress(content), np.uint8).reshape(picture.shape[0], -1)
    assert (rows[:, 0] == 0).all()
    assert np.array_equal(rows[:, 1:].reshape(picture.shape), picture)
