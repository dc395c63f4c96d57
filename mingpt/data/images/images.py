"""Images as tokens, each followed by its label: one GPT classifies images and draws them.

A sample is a first token, then the image's codes row by row, then the label. To learn to classify, the first token is
`unknown`: the model has to find the label at the end in the image. To learn to draw, the first token is the label; then
the label at the end is no target, since the model would only copy it. The sample's number decides which of the two it
is, and by how many pixels its image is shifted.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mingpt.data.cache import ArrayFile, cached
from mingpt.data.images.codebook import Pixels, fit, patches_of
from mingpt.data.images.imagefiles import KEY, Labelled, find_images
from mingpt.data.images.imagetokens import ImageTokens
from mingpt.data.kinds.images import ImagesData
from mingpt.data.padding import PaddedBatches
from mingpt.data.source import Microbatch, Samples, Source
from mingpt.data.vocabulary import Vocabulary
from mingpt.data.windows import TokenFile
from mingpt.errors import UserError
from mingpt.model.language import IGNORE
from mingpt.redact import without_secrets

CACHE_VERSION = 2  # raise when what is cached changes, or how a codebook is fitted


class Images(Samples):
    """Samples of the records [start, stop) of a file. A record is a label, then the image's pixels.

    image_weight: the weight of an image's tokens as targets; the label's is 1. shift: images move by up to so many
    pixels. draw: each image and shift is two samples, one to classify and one to draw.
    """

    def __init__(
        self,
        records: TokenFile,
        start: int,
        stop: int,
        tokens: ImageTokens,
        *,
        image_weight: float,
        shift: int = 0,
        draw: bool = False,
    ) -> None:
        self.records, self.start, self.stop, self.tokens = records, start, stop, tokens
        self.image_weight, self.shift, self.draw = image_weight, shift, draw
        self.places = 2 * shift + 1  # shifts in each direction
        self.variants = self.places**2 * (1 + draw)

    def __len__(self) -> int:
        return (self.stop - self.start) * self.variants

    def __getitem__(self, ids: Sequence[int]) -> Microbatch:
        """(tokens, targets, weights), each (len(ids), 1 + tokens of an image)."""
        which, variant = np.divmod(np.asarray(ids, dtype=np.int64), self.variants)
        variant, drawn = np.divmod(variant, 1 + self.draw)
        rows = self.records.mapped[self.start + which]
        images = rows[:, 1:].reshape(-1, *self.tokens.shape)
        codes = torch.from_numpy(self.tokens.encode(shifted(images, self.shift, *np.divmod(variant, self.places))))
        label = torch.from_numpy(self.tokens.label(rows[:, :1]))
        label_first = torch.from_numpy(drawn > 0)[:, None]
        tokens = torch.cat([torch.where(label_first, label, self.tokens.unknown), codes], 1)
        targets = torch.cat([codes, torch.where(label_first, IGNORE, label)], 1)
        weights = torch.full(targets.shape, self.image_weight, dtype=torch.float32)
        weights[:, -1] = 1
        return tokens, targets, weights


def shifted(images: Pixels, most: int, down: NDArray[Any], right: NDArray[Any]) -> Pixels:
    """Move each image (n, height, width, channels) by (down - most, right - most) pixels; fill with black.

    down, right: (n,), from 0 to 2 * most.
    """
    _, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (most, most), (most, most), (0, 0)))
    # Cutting a window further up out of the padded image moves its content down.
    starts = zip(2 * most - down, 2 * most - right, strict=True)
    return np.stack([image[y : y + height, x : x + width] for image, (y, x) in zip(padded, starts, strict=True)])


def _records(config: ImagesData, read: Callable[[], tuple[Labelled, Labelled]], given: ImageTokens | None) -> Any:
    """All records, the training ones first, and their vocabulary, number and sha256. given: a snapshot's vocabulary."""
    shown = f"{KEY}={without_secrets(config.path)}"
    train, test = read()
    height, width, channels = shape = train.images.shape[1:]
    for name, labels in (("training", train.labels), ("test", test.labels)):
        if len(beyond := np.flatnonzero(labels >= config.classes)):
            raise UserError(
                f"{shown}: the label of {name} image {beyond[0]} is {labels[beyond[0]]}, beyond 0 to "
                f"{config.classes - 1}: raise data.classes={config.classes}, or get the files again"
            )
    if given is not None:
        tokens = given
    elif height % config.patch or width % config.patch:
        divisors = [p for p in range(1, min(height, width) + 1) if height % p == width % p == 0]
        raise UserError(
            f"data.patch={config.patch} does not divide the images of {shown}, {height} x {width}: choose one of "
            f"{', '.join(map(str, divisors))}"
        )
    else:
        patches = patches_of(train.images, config.patch)
        book = fit(patches.reshape(-1, patches.shape[2]), config.codes)
        tokens = ImageTokens(shape, config.patch, config.classes, book.tobytes())
    if (tokens.shape, tokens.classes) != (shape, config.classes):
        raise UserError(
            f"{shown} has images of {height} x {width} x {channels} in {config.classes} classes, but the snapshot's "
            f"vocabulary is for {' x '.join(map(str, tokens.shape))} in {tokens.classes}: take data like the snapshot's"
        )
    splits = [np.concatenate([s.labels[:, None], s.images.reshape(len(s.labels), -1)], 1) for s in (train, test)]
    records = np.concatenate(splits)
    known = {"vocabulary": tokens.to_json(), "train": len(train.labels)}
    return records, known | {"sha256": sha256(repr((shape, known["train"])).encode() + records.tobytes()).hexdigest()}


def open_images(config: ImagesData, block_size: int, micro_size: int, vocabulary: Vocabulary | None = None) -> Source:
    """Read the files and fit the codebook, once per node; the test split validates.

    vocabulary: that of a snapshot, whose codebook is used in place of a fitted one. Raises UserError if files are
    missing, damaged or do not belong together, or if an image takes more tokens than block_size.
    """
    if vocabulary is not None and not isinstance(vocabulary, ImageTokens):
        raise UserError(
            f"{KEY}={without_secrets(config.path)}: the snapshot's vocabulary cannot encode images: take data of the "
            "kind that the snapshot was trained on"
        )
    found = find_images(config.path)
    keys = [config.patch, config.codes, config.classes]
    identity = ["images", CACHE_VERSION, *keys, found.identity, vocabulary and vocabulary.to_json()]

    def make(array: ArrayFile) -> Any:
        rows, kept = _records(config, found.read, vocabulary)
        array.append(rows)
        return kept

    path, about = cached(config, identity, make)
    tokens, records, border = ImageTokens.of_json(about["vocabulary"]), TokenFile(path), int(about["train"])
    length = 1 + tokens.per_image
    if block_size < length:
        raise UserError(
            f"model.block_size={block_size} is too short: a first token and an image in patches of "
            f"data.patch={tokens.patch} are {length}: set model.block_size={length}, or raise data.patch"
        )
    weight = config.image_weight
    train = Images(records, 0, border, tokens, image_weight=weight, shift=config.shift, draw=config.draw)
    test = Images(records, border, len(records), tokens, image_weight=weight)
    return Source(train, PaddedBatches(test, micro_size), tokens, about["sha256"], answer_length=1)
