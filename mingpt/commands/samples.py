"""A training sample for people: its text, or the image that its tokens are."""

from base64 import b64encode
from dataclasses import asdict
from typing import Any

import numpy as np

from mingpt.data.images.imagetokens import ImageTokens
from mingpt.data.images.pictures import COLORS, png
from mingpt.data.vocabulary import TextVocabulary, Vocabulary
from mingpt.train.closeup import Sample

MOST = 500  # characters of a sample
DARK_TO_BRIGHT = " .:-=+*#%@"
WIDEST = 32  # columns of a picture of characters


def shown_sample(sample: Sample, vocabulary: Vocabulary) -> dict[str, Any]:
    """JSON: what is known of the sample, `text`, and of an image `picture` (lines of characters) and `png` (base64)."""
    known = {k: v for k, v in asdict(sample).items() if k != "tokens"}
    if isinstance(vocabulary, ImageTokens):
        return known | _image(sample.tokens, vocabulary)
    if isinstance(vocabulary, TextVocabulary):
        text = vocabulary.decode([token for token in sample.tokens if token < vocabulary.size])
    else:
        text = " ".join(map(str, sample.tokens))
    return known | {"text": text if len(text) <= MOST else f"{text[:MOST]}…"}


def _image(tokens: list[int], vocabulary: ImageTokens) -> dict[str, Any]:
    """The first token and the last one tell the label, unless they are `unknown`; between them is the image."""
    codes = tokens[1 : 1 + vocabulary.per_image]
    labels = [t - vocabulary.codes for t in (tokens[0], tokens[-1]) if vocabulary.codes <= t < vocabulary.unknown]
    out: dict[str, Any] = {"text": f"an image of class {labels[0]}" if labels else "an image"}
    if len(codes) < vocabulary.per_image or any(code >= vocabulary.codes for code in codes):
        return out
    pixels = vocabulary.decode(np.array([codes], dtype=np.int64))[0]
    _height, width, channels = pixels.shape
    every = -(-width // WIDEST)
    grey = pixels[:: 2 * every, ::every].mean(2)  # a character is about twice as high as wide
    shades = (grey * (len(DARK_TO_BRIGHT) - 1) / 255).round().astype(int)
    out["picture"] = ["".join(DARK_TO_BRIGHT[s] for s in row) for row in shades.tolist()]
    if channels in COLORS:
        out["png"] = b64encode(png(pixels)).decode()
    return out
