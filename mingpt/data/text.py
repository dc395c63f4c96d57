"""Tokens from any text at any URL, cached once per node as a memory-mapped array."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mingpt.data.bpe import GPT2Tokens, HuggingFaceTokens, pieces, read_tokenizer
from mingpt.data.cache import Cached, cached
from mingpt.data.kinds.text import TextData
from mingpt.data.source import Source
from mingpt.data.vocabulary import Bytes, Characters, Vocabulary, vocabulary_of
from mingpt.data.windows import EvalChunks, TokenFile, WindowDataset
from mingpt.errors import UserError
from mingpt.redact import without_secrets
from mingpt.storage import open_fs, place

CACHE_VERSION = 2  # raise when what is cached changes


def _tokenize(raw: bytes, config: TextData, given: Vocabulary | None) -> tuple[NDArray[Any], Vocabulary]:
    """A text's tokens, and their vocabulary: the given one, or else the one that data.tokens names."""
    shown = f"data.path={without_secrets(config.path)}"
    if not raw:
        raise UserError(f"{shown}: the file is empty: name another")
    if isinstance(given, Bytes) or (given is None and config.tokens == "byte"):
        return np.frombuffer(raw, dtype=np.uint8), Bytes()
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{shown}: not UTF-8 at byte {error.start}: convert the file, or use data.tokens=byte"
        ) from error
    if isinstance(given, (GPT2Tokens, HuggingFaceTokens)):
        try:
            arrays = [given.encode_array(piece) for piece in pieces(text)]
        except UserError as error:
            which = f"data.tokenizer={without_secrets(config.tokenizer)}: " if config.tokenizer else ""
            raise UserError(f"{shown}: {which}{error}") from error
        return np.concatenate(arrays).astype(smallest_type(given.size)), given
    points, ids = np.unique(np.frombuffer(text.encode("utf-32-le"), dtype="<u4"), return_inverse=True)
    characters = "".join(map(chr, points))
    if given is None:
        if len(points) < 2:
            raise UserError(
                f"{shown}: only one character, {characters!r}, over and over: nothing to learn; name another text"
            )
        vocabulary = Characters(characters)
    elif isinstance(given, Characters):
        vocabulary = given
        try:
            ids = np.array(given.encode(characters))[ids]
        except UserError as error:
            raise UserError(f"{shown}: {error}: name another text") from error
    else:
        raise UserError(
            f"{shown}: the snapshot's vocabulary of kind {given.to_json()['kind']!r} cannot encode a text: take data "
            "of the kind that the snapshot was trained on"
        )
    return ids.reshape(-1).astype(smallest_type(vocabulary.size)), vocabulary


def smallest_type(size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest integer type that holds the tokens of a vocabulary of this size."""
    return np.uint8 if size <= 2**8 else np.uint16 if size <= 2**16 else np.uint32


def _token_file(config: TextData, given: Vocabulary | None) -> tuple[Path, dict[str, Any]]:
    """The cached tokens of `config.path`, and their vocabulary, number and the text's sha256."""
    fs, remote = open_fs(config.path, "data.path")
    with place("data.path", config.path):
        info = fs.info(remote)  # with size, modification time and ETag: a changed file gets another name in the cache
        if info["type"] == "directory":
            raise UserError(f"data.path={without_secrets(config.path)}: a folder; name one text file")
        if info["type"] == "other":  # a pipe or a device may never end
            raise UserError(f"data.path={without_secrets(config.path)}: no regular file; name one text file")
    source = ["text", CACHE_VERSION, config.tokens, fs.unstrip_protocol(remote), info, given and given.to_json()]

    def make() -> Cached:
        with place("data.path", config.path):
            raw = fs.cat_file(remote)
        array, vocabulary = _tokenize(raw, config, given)
        return array, {"vocabulary": vocabulary.to_json(), "sha256": sha256(raw).hexdigest(), "tokens": len(array)}

    return cached(config, source, make)


def open_text(config: TextData, block_size: int, micro_size: int = 1, vocabulary: Vocabulary | None = None) -> Source:
    """Tokenize (once per node) and split: the first part trains, the rest validates; no sample crosses the border.

    vocabulary: that of a snapshot, in place of one made from the text. Raises UserError if the text
    can't be read, isn't text, or is too short for block_size.
    """
    if vocabulary is None and config.tokenizer is not None:
        vocabulary = read_tokenizer(config.tokenizer, "data.tokenizer")
    path, about = _token_file(config, vocabulary)
    tokens, length = TokenFile(path), int(about["tokens"])
    border = round(length * (1 - config.val_fraction))
    train = WindowDataset(tokens, 0, border, block_size, config.stride)
    if len(train) == 0:
        raise UserError(
            f"model.block_size={block_size} is longer than the data: data.path={without_secrets(config.path)} has "
            f"{border} training tokens, and a sample takes {block_size + 1}: lower model.block_size or take more text"
        )
    if config.val_fraction and length - border < 2:
        raise UserError(
            f"data.val_fraction={config.val_fraction:g} of the {length} tokens of "
            f"data.path={without_secrets(config.path)} leaves nothing to validate on: raise it, or set it to 0"
        )
    validation = EvalChunks(tokens, border, length, block_size, micro_size)
    return Source(train, validation, vocabulary_of(about["vocabulary"]), about["sha256"])
