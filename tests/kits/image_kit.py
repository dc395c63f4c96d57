"""Tiny labelled images in the formats of the real data sets."""

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np

from mingpt.data.images.codebook import Pixels
from mingpt.data.images.imagefiles import CIFAR, IDX, IMAGES, LABELS


def idx(array: Pixels) -> bytes:
    """An IDX file of bytes."""
    magic = IMAGES if array.ndim == 3 else LABELS
    return b"".join(n.to_bytes(4, "big") for n in (magic, *array.shape)) + array.tobytes()


def stripes(count: int, side: int = 8, classes: int = 4) -> tuple[Pixels, Pixels]:
    """Images (n, side, side) with one bright stripe, and labels that say in which part of the image it is."""
    chooser = np.random.default_rng(count)
    where = chooser.integers(0, side, count)
    images = chooser.integers(0, 40, (count, side, side), dtype=np.uint8)
    images[np.arange(count), where] += 200
    return images, (where * classes // side).astype(np.uint8)


def write_idx(folder: Path, train: int = 60, test: int = 21, side: int = 8, packed: bool = False) -> Path:
    """The four files of a data set like MNIST."""
    folder.mkdir(parents=True, exist_ok=True)
    for (images_name, labels_name), count in zip(IDX.values(), (train, test), strict=True):
        images, labels = stripes(count, side)
        for name, array in ((images_name, images), (labels_name, labels)):
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                (folder / name).write_bytes(idx(array))
    return folder


def cifar_batch(count: int, seed: int) -> bytes:
    """Records as in CIFAR-10's binary version: the label, then 1024 red pixels, 1024 green ones, 1024 blue ones."""
    chooser = np.random.default_rng(seed)
    rows = chooser.integers(0, 256, (count, 1 + 3072), dtype=np.uint8)
    rows[:, 0] = chooser.integers(0, 10, count)
    return rows.tobytes()


def write_cifar(folder: Path, count: int = 4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(name for names in CIFAR.values() for name in names):
        (folder / name).write_bytes(cifar_batch(count, seed))
    return folder


def write_cifar_archive(path: Path, count: int = 4) -> Path:
    """As the data set is published: the files in a folder of their own, beside others."""
    with tarfile.open(path, "w:gz") as tar:
        for seed, name in enumerate(name for names in CIFAR.values() for name in names):
            content = cifar_batch(count, seed)
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        tar.addfile(tarfile.TarInfo("cifar-10-batches-bin/readme.html"))
    return path
