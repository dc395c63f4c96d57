"""Drawing with a model of images: samples of each class, as one PNG file."""

import struct
import zlib

import numpy as np
import torch
from torch import Tensor

from mingpt.data.images.codebook import Pixels
from mingpt.data.images.imagetokens import ImageTokens
from mingpt.model.language import LanguageModel
from mingpt.model.sampling import finite

GAP, GREY = 2, 128  # pixels between two images, and their value
COLORS = {1: 0, 3: 2}  # PNG's color types, by channels: grey; red, green and blue


@torch.no_grad()
def draw(
    model: LanguageModel,
    tokens: ImageTokens,
    each: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Pixels:
    """Draw `each` images of every class, each after its label: (classes, each, height, width, channels).

    temperature, top_k: as in mingpt.model.sampling. The same seed gives the same images.
    """
    generator, device = torch.Generator().manual_seed(seed), next(model.parameters()).device
    labels = torch.from_numpy(tokens.label(np.arange(tokens.classes)))
    drawn: Tensor = labels.repeat_interleave(each)[:, None]
    for _ in range(tokens.per_image):
        # Codes only: a label is no patch. What is drawn is drawn on the CPU.
        logits = finite(model.logits(drawn.to(device))[:, -1, : tokens.codes].cpu())
        if top_k is not None and top_k < tokens.codes:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
        if temperature == 0:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            chosen = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        drawn = torch.cat([drawn, chosen], 1)
    return tokens.decode(drawn[:, 1:].numpy()).reshape(tokens.classes, each, *tokens.shape)


def grid(images: Pixels) -> Pixels:
    """Images (rows, columns, height, width, channels) as one picture (height, width, channels), with gaps between."""
    rows, columns, height, width, channels = images.shape
    out = np.full((rows, height + GAP, columns, width + GAP, channels), GREY, dtype=np.uint8)
    out[:, :height, :, :width] = images.swapaxes(1, 2)
    return out.reshape(rows * (height + GAP), columns * (width + GAP), channels)[:-GAP, :-GAP]


def png(picture: Pixels) -> bytes:
    """A picture (height, width, 1 or 3 channels) as a PNG file."""
    height, width, channels = picture.shape

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(b"\0" + row.tobytes() for row in picture)  # 0: this row has no filter
    header = struct.pack(">IIBBBBB", width, height, 8, COLORS[channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
