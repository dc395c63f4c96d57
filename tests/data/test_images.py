"""examples/images: the files' formats, what is wrong with them, and shifts."""

import gzip
from pathlib import Path

import pytest
import torch

from examples.images import files
from mingpt.errors import UserError
from tests.kits.image_kit import cifar_files, write_archive, write_idx


def test_an_archive_holds_what_its_files_do(tmp_path: Path) -> None:
    for name, content in (cifar := cifar_files()).items():
        (tmp_path / name).write_bytes(content)
    source, raw = files.source(str(tmp_path), 4), cifar["data_batch_1.bin"]
    assert files.source(str(write_archive(tmp_path / "c.tar.gz", cifar)), 4).sha256 == source.sha256
    images, labels = source.train[[0, 1]]
    assert (images.shape, images.dtype, labels.tolist()) == ((2, 3, 32, 32), torch.uint8, [raw[0], raw[3073]])
    assert images[1, :, 2, 5].tolist() == [raw[3073 + 1 + plane * 1024 + 2 * 32 + 5] for plane in range(3)]


def test_a_sample_is_an_image_in_one_of_its_places() -> None:
    image = torch.arange(1, 10, dtype=torch.uint8).reshape(1, 1, 3, 3)
    samples = files.Shifted(image.repeat(2, 1, 1, 1), torch.tensor([5, 6]), 1)
    images, labels = samples[[1, 17]]
    assert (len(samples), labels.tolist()) == (18, [5, 6])
    assert torch.equal(images[0, 0, 1:], image[0, 0, :2])  # down by one
    assert torch.equal(images[1, 0, :2, :2], image[0, 0, 1:, 1:])  # up and to the left
    assert int(images.count_nonzero()) == 6 + 4


BOMB = gzip.compress(bytes(files.LARGEST + 1), 1)


@pytest.mark.parametrize(
    ("name", "content", "about"),
    [
        ("t10k-labels-idx1-ubyte", b"", "t10k-labels-idx1-ubyte has 0 bytes"),
        ("t10k-labels-idx1-ubyte.gz", BOMB, "t10k-labels-idx1-ubyte.gz unpacks to more than"),
        ("t10k-images-idx3-ubyte", None, "t10k-images-idx3-ubyte is missing"),
        ("train-images-idx3-ubyte", b"\x89PNG", "train-images-idx3-ubyte has 4"),
    ],
)
def test_what_is_wrong_with_files_is_said(tmp_path: Path, name: str, content: bytes | None, about: str) -> None:
    folder = write_idx(tmp_path / "images")
    (folder / name.removesuffix(".gz")).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=f"^data.path={folder}: {about}"):
        files.source(str(folder), 4)
    with pytest.raises(UserError, match=f"^data.path={tmp_path}: no images there"):
        files.source(str(tmp_path), 4)
