"""Labelled images from the data sets' own files: IDX (MNIST, Fashion-MNIST) and the binary version of CIFAR-10."""

import gzip
import io
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from mingpt.data.images.codebook import Pixels
from mingpt.errors import UserError
from mingpt.redact import without_secrets
from mingpt.storage import fetch_it, open_fs, place

KEY = "data.path"
IMAGES, LABELS = 0x0803, 0x0801  # an IDX file begins with two zeros, the type (8: bytes) and the number of dimensions
# Each split's files: images, labels.
IDX = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
CIFAR = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)}
CIFAR_SHAPE = (32, 32, 3)
AGAIN = "get the file again"
# Bounds against a gzip bomb: a file may unpack to PLAIN_BYTES, or to MOST_PACKED times its size if that is more.
PLAIN_BYTES, MOST_PACKED = 64 << 20, 100


@dataclass(frozen=True)
class Labelled:
    images: Pixels  # (n, height, width, channels)
    labels: Pixels  # (n,)


@dataclass(frozen=True)
class ImageFiles:
    """A data set's files. identity: their place, sizes, times and ETags, which change when the files do."""

    identity: list[Any]
    read: Callable[[], tuple[Labelled, Labelled]]  # returns the training images, then the test images


def find_images(url: str) -> ImageFiles:
    """The data set at a URL, not read yet. Raises UserError if no known data set is there, or a file is missing."""
    fs, root = open_fs(url, KEY)
    shown = f"{KEY}={without_secrets(url)}"
    if root.endswith((".tar.gz", ".tgz")):
        with place(KEY, url):
            info = fs.info(root)
        return ImageFiles(
            [fs.unstrip_protocol(root), info], lambda: _cifar(_unpacked(_get(fs, root, url), shown), shown)
        )

    def path(name: str) -> str:
        """The path of the file, plain or with .gz; empty if neither is there."""
        for candidate in (name, f"{name}.gz"):
            with place(KEY, url):
                if fs.exists(f"{root}/{candidate}"):
                    return f"{root}/{candidate}"
        return ""

    for layout, reader in ((IDX, _idx), (CIFAR, _cifar)):
        paths = {name: path(name) for names in layout.values() for name in names}
        if not any(paths.values()):
            continue
        if missing := [name for name, found in paths.items() if not found]:
            raise UserError(f"{shown}: {', '.join(missing)} is missing there: the data set has {', '.join(paths)}")
        with place(KEY, url):
            infos = [fs.info(found) for found in paths.values()]

        def read(reader: Any = reader, paths: dict[str, str] = paths) -> tuple[Labelled, Labelled]:
            return reader(
                {n: _plain(_get(fs, p, url), f"{shown}: {p[len(root) + 1 :]}") for n, p in paths.items()}, shown
            )

        return ImageFiles([fs.unstrip_protocol(root), infos], read)
    raise UserError(
        f"{shown}: no images there: name a folder with {IDX['train'][0]} and its like (MNIST, Fashion-MNIST; .gz or "
        f"plain) or with {CIFAR['train'][0]} and its like (CIFAR-10, binary version), or the latter's .tar.gz"
        f"{fetch_it(url)}"
    )


def _get(fs: Any, path: str, url: str) -> bytes:
    with place(KEY, url):
        return bytes(fs.cat_file(path))


def _plain(raw: bytes, shown: str) -> bytes:
    return _unzipped(raw, shown, "a gzip file") if shown.endswith(".gz") else raw


def _unzipped(raw: bytes, shown: str, what: str) -> bytes:
    """Unpack gzip, but no more bytes than images pack into. what: the kind of file, for the error. Raises UserError."""
    most = max(PLAIN_BYTES, MOST_PACKED * len(raw))
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            plain = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{shown}: not {what}, or damaged ({error}): {AGAIN}") from error
    if len(plain) > most:
        raise UserError(f"{shown}: unpacks to more than {most} bytes from {len(raw)}, as no images do: {AGAIN}")
    return plain


def _unpacked(raw: bytes, shown: str) -> dict[str, bytes]:
    """The files of CIFAR-10's archive, by name. They are read in memory: no name in the archive reaches the disk."""
    wanted = {name for names in CIFAR.values() for name in names}
    found: dict[str, bytes] = {}
    plain = _unzipped(raw, shown, "a .tar.gz")
    try:
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                if name in wanted and (file := tar.extractfile(member)):
                    found[name] = file.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise UserError(f"{shown}: not a .tar.gz, or damaged ({error}): {AGAIN}") from error
    if missing := sorted(wanted - found.keys()):
        raise UserError(f"{shown}: {', '.join(missing)} is not in it: take cifar-10-binary.tar.gz")
    return found


def _idx(files: dict[str, bytes], shown: str) -> tuple[Labelled, Labelled]:
    splits: list[Labelled] = []
    for images_name, labels_name in IDX.values():
        images = _idx_array(files[images_name], IMAGES, f"{shown}: {images_name}")
        labels = _idx_array(files[labels_name], LABELS, f"{shown}: {labels_name}")
        if len(images) != len(labels):
            raise UserError(
                f"{shown}: {len(images)} images in {images_name}, but {len(labels)} labels in {labels_name}: "
                "take both from one data set"
            )
        splits.append(Labelled(images[..., None], labels))
    train, test = splits
    if train.images.shape[1:] != test.images.shape[1:]:
        raise UserError(
            f"{shown}: images of {_by(train.images.shape[1:3])} in {IDX['train'][0]}, of "
            f"{_by(test.images.shape[1:3])} in {IDX['test'][0]}: take both from one data set"
        )
    return train, test


def _idx_array(raw: bytes, magic: int, shown: str) -> Pixels:
    what, other = ("images", "labels") if magic == IMAGES else ("labels", "images")
    begins = int.from_bytes(raw[:4], "big")
    if len(raw) < 4 or begins != magic:
        hint = f"it holds {other}" if begins in (IMAGES, LABELS) else "it is not an IDX file"
        raise UserError(f"{shown} begins with {raw[:4].hex()}, not with {magic:08x} as {what} do ({hint}): {AGAIN}")
    dimensions = magic & 0xFF
    header = 4 + 4 * dimensions
    sizes = [int.from_bytes(raw[at : at + 4], "big") for at in range(4, header, 4)]
    if len(raw) >= header and 0 in sizes:
        raise UserError(f"{shown} announces {_by(sizes)} {what}, so it has none: {AGAIN}")
    if len(raw) != header + prod(sizes):
        raise UserError(
            f"{shown} has {len(raw)} bytes, but its first {header} announce {header + prod(sizes)} "
            f"({_by(sizes)} {what}): {AGAIN}"
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(sizes)


def _cifar(files: dict[str, bytes], shown: str) -> tuple[Labelled, Labelled]:
    record = 1 + prod(CIFAR_SHAPE)  # the label, then all red pixels, all green, all blue
    splits: list[Labelled] = []
    for names in CIFAR.values():
        for name in names:
            if not files[name] or len(files[name]) % record:
                raise UserError(
                    f"{shown}: {name} has {len(files[name])} bytes, not a multiple of {record}, the size of a label "
                    f"and an image: {AGAIN}"
                )
        rows = np.frombuffer(b"".join(files[name] for name in names), dtype=np.uint8).reshape(-1, record)
        height, width, channels = CIFAR_SHAPE
        images = rows[:, 1:].reshape(-1, channels, height, width).transpose(0, 2, 3, 1)
        splits.append(Labelled(np.ascontiguousarray(images), rows[:, 0]))
    return splits[0], splits[1]


def _by(sizes: Any) -> str:
    return " x ".join(map(str, sizes))
