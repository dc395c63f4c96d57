"""Tokens from any text at any URL, cached once per node as a memory-mapped array."""

import codecs
import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mingpt.cli.console import say
from mingpt.config.datasets import TextData, Tokenized
from mingpt.data.bpe import Encoder, pieces, read_tokenizer
from mingpt.data.cache import ArrayFile, cached
from mingpt.data.source import Source, Vocabulary
from mingpt.data.vocabulary import Bytes, Characters, vocabulary_of
from mingpt.data.windows import EvalChunks, PaddedBatches, TokenFile, training_windows
from mingpt.errors import TransientError, UserError
from mingpt.files.storage import is_local, name_of, open_fs, place

CACHE_VERSION = 2  # raise when what is cached changes
BLOCK = 1 << 22  # bytes that are read and encoded at once
LARGE = 1 << 26  # bytes of a text of which it is said that it is read
NO_TEXT = re.compile(r"\.(csv|tsv|jsonl?|ndjson|parquet|pq|gz|bz2|xz|zst|zip)$", re.I)


class _Text:
    """A text's file on this machine, read in blocks."""

    def __init__(self, path: Path, url: str) -> None:
        self.path, self.url, self.size = path, url, path.stat().st_size
        self.shown = f"data.path={url}"
        self.sha256 = ""
        if not self.size:
            raise UserError(f"{self.shown}: the file is empty: name another")
        if form := NO_TEXT.search(name_of(url)):
            say(
                f"warning: {self.shown}: a {form[0]} is trained on as it stands, with all its marks: `mingpt prepare` "
                "takes the texts out of tables (data=shards), and data=chat reads conversations in .jsonl"
            )
        if self.size >= LARGE:
            say(f"reading {self.shown}: {self.size / 1e9:.2f} GB")

    def blocks(self) -> Iterator[bytes]:
        """Raises TransientError at the end if these are not those of the pass before."""
        content = sha256()
        with place("data.path", self.url), open(self.path, "rb") as file:
            while block := file.read(BLOCK):
                content.update(block)
                yield block
        if self.sha256 not in ("", content.hexdigest()):
            raise TransientError(f"{self.shown}: it has changed while it was read: try again")
        self.sha256 = content.hexdigest()

    def texts(self) -> Iterator[str]:
        """Raises UserError if it is not UTF-8."""
        decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
        for block in chain(self.blocks(), [b""]):
            begin = at - len(decoder.getstate()[0])  # a character may lie in two blocks
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{self.shown}: not UTF-8 at byte {begin + error.start}: convert the file, or use data.tokens=byte"
                ) from error
            yield text
            at += len(block)

    def points(self) -> Iterator[NDArray[np.uint32]]:
        """The code points of its characters."""
        return (np.frombuffer(text.encode("utf-32-le"), "<u4") for text in self.texts())


def _encode(path: Path, config: TextData, given: Vocabulary | None, array: ArrayFile) -> dict[str, Any]:
    """Write the tokens of a text. Returns what else is kept of it."""
    bytes_alone = isinstance(given, Bytes) or (given is None and config.tokens == "byte")
    text = _Text(path, config.path)
    if bytes_alone:
        vocabulary: Vocabulary = Bytes()
        for block in text.blocks():
            array.append(np.frombuffer(block, np.uint8))
    elif isinstance(given, Encoder):
        vocabulary = given
        which = f"data.tokenizer={config.tokenizer}: " if config.tokenizer else ""
        for piece in pieces(text.texts()):
            try:
                tokens = given.encode(piece)
            except UserError as error:
                raise UserError(f"{text.shown}: {which}{error}") from error
            array.append(np.array(tokens, smallest_type(given.size)))
    else:
        vocabulary = _encode_characters(text, given, array)
    return {"vocabulary": vocabulary.to_json(), "sha256": text.sha256, "tokens": array.length}


def _encode_characters(text: _Text, given: Vocabulary | None, array: ArrayFile) -> Characters:
    """Read the text for its characters, then once more for their tokens."""
    if given is not None and not isinstance(given, Characters):
        raise UserError(
            f"{text.shown}: the snapshot's vocabulary of kind {given.to_json()['kind']!r} cannot encode a text: take "
            "data of the kind that the snapshot was trained on"
        )
    seen = np.zeros(0x110000, bool)
    for points in text.points():
        seen[points] = True
    characters = "".join(map(chr, np.flatnonzero(seen)))
    if "\ufeff" in characters:
        say(f"warning: {text.shown}: a byte-order mark (U+FEFF) is in it, and becomes a token: save it without")
    if given is None and len(characters) < 2:
        raise UserError(
            f"{text.shown}: only one character, {characters!r}, over and over: nothing to learn; name another text"
        )
    vocabulary = given or Characters(characters)
    ids = np.zeros(len(seen), smallest_type(vocabulary.size))
    try:
        ids[seen] = vocabulary.encode(characters)
    except UserError as error:
        raise UserError(f"{text.shown}: {error}: name another text") from error
    for points in text.points():
        array.append(ids[points])
    return vocabulary


def smallest_type(size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest integer type that holds the tokens of a vocabulary of this size."""
    return np.uint8 if size <= 2**8 else np.uint16 if size <= 2**16 else np.uint32


def token_file(
    config: Tokenized,
    given: Vocabulary | None,
    spelled: Sequence[str],
    make: Callable[[Path, ArrayFile], dict[str, Any]],
) -> tuple[Path, dict[str, Any]]:
    """What `make` makes of the file of `config.path`, once per node: tokens, and what else is kept of it.

    spelled: the kind of data, and all else that the tokens depend on.
    """
    fs, remote = open_fs(config.path, "data.path")
    with place("data.path", config.path):
        info = fs.info(remote)  # with size, modification time and ETag: a changed file gets another name in the cache
        if info["type"] != "file":  # a pipe or a device may never end
            raise UserError(f"data.path={config.path}: no regular file: name one file")
        if is_local(fs):
            open(remote, "rb").close()  # whether it may be read is told before what is wrong with the cache
    kind, *rest = spelled
    source = [kind, CACHE_VERSION, config.tokens, fs.unstrip_protocol(remote), info, given and given.to_json(), *rest]

    def made(array: ArrayFile) -> dict[str, Any]:
        if is_local(fs):
            return make(Path(remote), array)
        copy = Path(f"{array.file.name}.text")
        try:
            with place("data.path", config.path):
                fs.get_file(remote, str(copy))
            return make(copy, array)
        finally:
            copy.unlink(missing_ok=True)

    return cached(config, source, made)


def open_text(config: TextData, block_size: int, micro_size: int = 1, vocabulary: Vocabulary | None = None) -> Source:
    """Tokenize (once per node) and split: the first part trains, the rest validates; no sample crosses the border.

    vocabulary: that of a snapshot, in place of one made from the text. Raises UserError if the text
    can't be read, isn't text, or is too short for block_size.
    """
    if vocabulary is None and config.tokenizer is not None:
        vocabulary = read_tokenizer(config.tokenizer, "data.tokenizer")
    path, about = token_file(config, vocabulary, ["text"], lambda path, array: _encode(path, config, vocabulary, array))
    tokens, length = TokenFile(path), int(about["tokens"])
    border = round(length * (1 - config.val_fraction))
    shown = f"data.path={config.path}"
    train = training_windows(tokens, border, block_size, config.stride, shown)
    if config.val_fraction and length - border < 2:
        raise UserError(
            f"data.val_fraction={config.val_fraction:g} of the {length} tokens of {shown} leaves nothing to validate "
            f"on: raise it, or set it to 0"
        )
    validation = PaddedBatches(EvalChunks(tokens, border, length, block_size), micro_size)
    return Source(train, validation, vocabulary_of(about["vocabulary"]), about["sha256"])
