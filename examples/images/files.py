"""Labelled images from the data sets' own files: IDX (MNIST, Fashion-MNIST) and CIFAR-10's binary version."""

import gzip
import io
import struct
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import IO

import torch
from torch import Tensor
from torch.nn import functional as F

from mingpt.cli.redact import without_secrets
from mingpt.data.own import source_of
from mingpt.data.source import Microbatch, Samples, Source
from mingpt.errors import UserError
from mingpt.files.storage import fetch_it, open_fs, place

KEY = "data.path"
# The files of the training split, then of the test split.
IDX = (("train-images-idx3-ubyte", "train-labels-idx1-ubyte"), ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"))
CIFAR = (tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",))
RECORD = 1 + 3 * 32 * 32  # bytes of CIFAR-10: the label, then all red pixels, all green, all blue
LARGEST = 64 << 20  # bytes that a file may unpack to: the largest of these has 45 MiB
Files = dict[str, bytes]
Split = tuple[Tensor, Tensor]  # images (n, channels, height, width), uint8; labels (n,), int64


class Shifted(Samples):
    """Each image in all places up to `shift` pixels away, with black around it: the sample's number says which."""

    def __init__(self, images: Tensor, labels: Tensor, shift: int) -> None:
        self.images, self.labels, self.shift, self.places = images, labels, shift, 2 * shift + 1

    def __len__(self) -> int:
        return len(self.images) * self.places**2

    def __getitem__(self, ids: Sequence[int]) -> Microbatch:
        chosen = torch.as_tensor(ids)
        rows, variant = chosen // self.places**2, chosen % self.places**2
        padded, (height, width) = F.pad(self.images[rows], [self.shift] * 4), self.images.shape[-2:]
        corners = zip(padded, (variant // self.places).tolist(), (variant % self.places).tolist(), strict=True)
        return torch.stack([image[:, y : y + height, x : x + width] for image, y, x in corners]), self.labels[rows]


def source(path: str, micro_size: int, shift: int = 0, classes: int = 10) -> Source:
    """path: the URL of a folder with MNIST's files, plain or .gz, or with CIFAR-10's, or of the latter's .tar.gz.

    shift: training shows each image moved by up to so many pixels each way.
    """
    packed = read(path)
    try:
        files = unpack(packed)
        train, test = cifar(files) if CIFAR[1][0] in files else idx(files)
        for images, labels in (train, test):
            if len(images) != len(labels) or images.shape[1:] != train[0].shape[1:]:
                raise ValueError(f"{len(images)} images and {len(labels)} labels do not belong together")
            if labels.max() >= classes:
                raise ValueError(f"the label {labels.max()} is beyond data.classes={classes}")
    except (ValueError, EOFError, OSError, zlib.error, tarfile.TarError) as error:
        raise UserError(f"{KEY}={without_secrets(path)}: {error}: get the files again") from error
    made = source_of(train, test, micro_size)
    return replace(made, train=Shifted(*train, shift)) if shift else made


def read(url: str) -> Files:
    """The files at a URL as they are, by name: an archive, or those of one of the layouts. Raises UserError."""
    fs, root = open_fs(url, KEY)
    with place(KEY, url):
        if root.endswith((".tar.gz", ".tgz")):
            return {"archive.tar.gz": fs.cat_file(root)}
        for layout in (IDX, CIFAR):
            names = [name for split in layout for name in split]
            there = [n + ending for n in names for ending in ("", ".gz") if fs.exists(f"{root}/{n}{ending}")]
            if there:
                return {name: fs.cat_file(f"{root}/{name}") for name in there}
    raise UserError(
        f"{KEY}={without_secrets(url)}: no images there: give a folder with {IDX[0][0]} and its like (MNIST, "
        f"Fashion-MNIST), or CIFAR-10's binary version (cifar-10-binary.tar.gz){fetch_it(url)}"
    )


def unpack(packed: Files) -> Files:
    """The same files, plain. Raises ValueError, or what gzip and tarfile raise, if they are damaged or incomplete."""
    files: Files = {}
    for name, raw in packed.items():
        if name.endswith(".tar.gz"):
            with tarfile.open(fileobj=io.BytesIO(raw), mode="r|gz") as tar:  # a stream: in memory, a file at a time
                for member in tar:
                    name = member.name.rpartition("/")[2]
                    if name in (*CIFAR[0], *CIFAR[1]) and (file := tar.extractfile(member)):
                        files[name] = limited(file, name)
        elif name.endswith(".gz"):
            files[name[:-3]] = limited(gzip.GzipFile(fileobj=io.BytesIO(raw)), name)
        else:
            files[name] = raw
    layout = IDX if any(name in files for split in IDX for name in split) else CIFAR
    if missing := [name for split in layout for name in split if name not in files]:
        which = ", which CIFAR-10's binary version has (cifar-10-binary.tar.gz), not the one for Python"
        raise ValueError(f"{', '.join(missing)} is missing{which if layout is CIFAR else ''}")
    return files


def limited(file: IO[bytes] | gzip.GzipFile, name: str) -> bytes:
    content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"{name} unpacks to more than {LARGEST} bytes, as no images do")
    return content


def idx(files: Files) -> list[Split]:
    return [
        (of_idx(files[images], images, 3)[:, None], of_idx(files[labels], labels, 1).long()) for images, labels in IDX
    ]


def of_idx(raw: bytes, name: str, dimensions: int) -> Tensor:
    """IDX: two zeros, the type (8: bytes), the number of dimensions; then each one's size, and the numbers."""
    header = 4 + 4 * dimensions
    sizes = struct.unpack(f">{dimensions}I", raw[4:header]) if len(raw) > header else ()
    if raw[:4] != bytes((0, 0, 8, dimensions)) or len(raw) != header + prod(sizes):
        raise ValueError(f"{name} has {len(raw)} bytes, and is no IDX file of that size in {dimensions} dimensions")
    return torch.frombuffer(bytearray(raw[header:]), dtype=torch.uint8).reshape(sizes)


def cifar(files: Files) -> list[Split]:
    splits: list[Split] = []
    for names in CIFAR:
        for name in names:
            if not files[name] or len(files[name]) % RECORD:
                raise ValueError(f"{name} has {len(files[name])} bytes, not a multiple of {RECORD} (label and image)")
        rows = torch.frombuffer(bytearray(b"".join(files[n] for n in names)), dtype=torch.uint8).reshape(-1, RECORD)
        splits.append((rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()))
    return splits
