"""The vocabulary of images: codes of patches, a label for each class, and a token for an unknown class."""

from base64 import b64decode, b64encode
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mingpt.data.images.codebook import Pixels, images_of, nearest, patches_of


@dataclass(frozen=True)
class ImageTokens:
    """Tokens: first the codes, then the labels, then `unknown`.

    shape: (height, width, channels) of an image. patch: pixels of a patch's side. codebook: the pixels of one
    code after the other. Raises ValueError if they do not fit each other.
    """

    shape: tuple[int, int, int]
    patch: int
    classes: int
    codebook: bytes

    def __post_init__(self) -> None:
        height, width, channels = self.shape
        if min(*self.shape, self.patch, self.classes) < 1 or height % self.patch or width % self.patch:
            raise ValueError(f"no images of {height} x {width} x {channels} in patches of {self.patch}")
        if not self.codebook or len(self.codebook) % (self.patch**2 * channels):
            raise ValueError(f"{len(self.codebook)} bytes are no codebook")

    @cached_property
    def table(self) -> Pixels:
        """The codebook as (codes, pixels of a patch)."""
        return np.frombuffer(self.codebook, dtype=np.uint8).reshape(-1, self.patch**2 * self.shape[2])

    @property
    def codes(self) -> int:
        return len(self.table)

    @property
    def unknown(self) -> int:
        return self.codes + self.classes

    @property
    def size(self) -> int:
        return self.codes + self.classes + 1

    @property
    def per_image(self) -> int:
        """The number of tokens of an image without its label."""
        return self.shape[0] // self.patch * (self.shape[1] // self.patch)

    def label(self, classes: NDArray[Any]) -> NDArray[np.int64]:
        """The tokens of class numbers, of the same shape."""
        return classes.astype(np.int64) + self.codes

    def encode(self, images: Pixels) -> NDArray[np.int64]:
        """Images (n, *shape) as the codes (n, per_image) nearest to their patches, row by row."""
        patches = patches_of(images, self.patch)
        return nearest(patches.reshape(-1, patches.shape[2]), self.table).reshape(len(images), -1)

    def decode(self, codes: NDArray[np.int64]) -> Pixels:
        """Codes (n, per_image) as images (n, *shape)."""
        return images_of(self.table[codes], self.shape, self.patch)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "image",
            "shape": list(self.shape),
            "patch": self.patch,
            "classes": self.classes,
            "codebook": b64encode(self.codebook).decode(),
        }

    @classmethod
    def of_json(cls, json: dict[str, Any]) -> "ImageTokens":
        height, width, channels = (int(n) for n in json["shape"])
        codebook = b64decode(json["codebook"], validate=True)
        return cls((height, width, channels), int(json["patch"]), int(json["classes"]), codebook)
