"""Images as tokens."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from mingpt.config.kinds import register
from mingpt.config.section import MISSING, NO_RESULT
from mingpt.data.kinds.files import CachedData

if TYPE_CHECKING:
    from mingpt.config.schema import Config
    from mingpt.data.source import Source
    from mingpt.data.vocabulary import Vocabulary


@register
class ImagesData(CachedData):
    kind: Literal["images"] = "images"
    """images as tokens, each followed by its label"""
    path: Annotated[str, NO_RESULT] = Field(default=MISSING, min_length=1)
    """MNIST's or Fashion-MNIST's folder, CIFAR-10's (binary version) or its .tar.gz: any fsspec URL."""
    patch: int = Field(default=4, ge=1, le=64)
    """Side of a patch in pixels; each patch is a token. It divides the images' height and width."""
    codes: int = Field(default=256, ge=2, le=2**16)
    """Different patches that there are tokens for: the codebook, fitted to the training images."""
    classes: int = Field(default=10, ge=1, le=256)
    """Labels are numbers from 0 to classes - 1."""
    shift: int = Field(default=0, ge=0, le=8)
    """Training shows each image moved by up to so many pixels each way: in (2 shift + 1)² places."""
    image_weight: float = Field(default=0.1, ge=0)
    """How much an image's token counts; its label counts 1. 0: learn nothing but labels."""
    draw: bool = False
    """Training shows each image a second time with its label first: learn to draw what is asked for."""

    reads = ("data.draw", "data.image_weight")

    def problem(self, config: "Config") -> str | None:
        if self.draw and self.image_weight == 0:
            return "data.draw=true, but data.image_weight=0 teaches no drawing: raise it, or set data.draw=false"
        return None

    def open(self, block_size: int, micro_size: int, vocabulary: "Vocabulary | None" = None) -> "Source":
        from mingpt.data.images.images import open_images

        return open_images(self, block_size, micro_size, vocabulary)

    def vocabulary_size(self) -> int:
        return self.codes + self.classes + 1

    @classmethod
    def vocabularies(cls) -> "dict[str, Callable[[dict[str, Any]], Vocabulary]]":
        from mingpt.data.images.imagetokens import ImageTokens

        return {"image": ImageTokens.of_json}
