"""Tiny labelled images in the formats of the real data sets."""

import io
import tarfile
from pathlib import Path

import torch
from torch import Tensor

from examples.images.files import CIFAR, IDX, RECORD


def write_idx(folder: Path, train: int = 60, test: int = 21, side: int = 8) -> Path:
    """The four files of a data set like MNIST: noise with a bright stripe, whose place says which of four classes."""
    folder.mkdir(parents=True, exist_ok=True)
    for names, count in zip(IDX, (train, test), strict=True):
        random = torch.Generator().manual_seed(count)
        where = torch.randint(side, (count,), generator=random)
        images = torch.randint(40, (count, side, side), generator=random)
        images[torch.arange(count), where] += 200
        for name, array in zip(names, (images, where * 4 // side), strict=True):
            (folder / name).write_bytes(idx(array))
    return folder


def idx(array: Tensor) -> bytes:
    """An array in MNIST's format."""
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return bytes((0, 0, 8, array.dim())) + sizes + bytes(array.flatten().tolist())


def cifar_files() -> dict[str, bytes]:
    """CIFAR-10's binary version: records of a label and 3 x 1024 pixels."""
    random = torch.Generator().manual_seed(4)
    files = {}
    for name in (*CIFAR[0], *CIFAR[1]):
        rows = torch.randint(256, (4, RECORD), generator=random)
        rows[:, 0] %= 10
        files[name] = bytes(rows.flatten().tolist())
    return files


def write_archive(path: Path, files: dict[str, bytes]) -> Path:
    """As the data set is published: the files in a folder of their own, beside another one."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in {**files, "readme.html": b""}.items():
            info = tarfile.TarInfo(f"cifar-10-batches/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path
