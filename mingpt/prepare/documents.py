"""Documents out of text files, JSON lines and Parquet, read as streams: files may be larger than memory.

A file is cut into blocks, which the encoding processes take one by one. How it is cut depends on its content alone.
"""

import codecs
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256
from itertools import chain
from typing import Any, NamedTuple

from mingpt.data import bpe
from mingpt.errors import UserError
from mingpt.prepare.parquet import parquet_column
from mingpt.prepare.sources import COMPRESSED, File
from mingpt.storage import name_of, open_fs, place, unread

READ = 1 << 20  # bytes that are read at a time, and about the size of a block
LONGEST_LINE = 64 << 20  # bytes of a line of JSON; parsed, it may take 20 times as many


@dataclass(frozen=True)
class Options:
    """What a document is, and which documents validate.

    separator: between the documents of a text file; empty: the file is one document. field: the field of a JSON
    object or the column of a Parquet file that holds the text. val_fraction: the share of documents that validate.
    """

    separator: str = ""
    field: str = "text"
    val_fraction: float = 0.0


class Piece(NamedTuple):  # there may be millions: a tuple is the fastest to send to another process
    """A document, or a part of a long one.

    ends: whether the document ends with this piece. validation: whether the document validates; None for a whole
    document: the process that encodes it decides by its hash.
    """

    text: str
    ends: bool
    validation: bool | None


@dataclass(frozen=True)
class Block:
    """A part of a file: pieces of text and Parquet, whole lines of JSON.

    size: the bytes of the file that the block covers. number: of the first line, counted from 1. content: a hash of the
    file's content up to the end of this block; that of the last block is the whole file's.
    """

    file: File
    size: int
    pieces: tuple[Piece, ...] = ()
    lines: bytes = b""
    number: int = 0
    content: str = ""


def is_validation(first_piece: str, fraction: float) -> bool:
    """Choose a document's split by the hash of its first piece, which is all of it unless it is long.

    So the same text goes to the same split, whatever file it is in and whatever else is prepared with it.
    """
    if not fraction:
        return False
    digest = blake2b(first_piece.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def blocks(file: File, options: Options) -> Iterator[Block]:
    """Yield the file's blocks in order, at least one. Raises UserError if the file is not of its form."""
    digest = sha256()
    with place("SOURCES", file.shown):
        if file.form == "parquet":
            found = _parquet_blocks(file, options, digest)
        else:
            found = (_json_blocks if file.form == "jsonl" else _text_blocks)(file, _chunks(file, digest), options)
        empty = True
        for block in found:
            empty = False
            yield replace(block, content=digest.hexdigest())
        if empty:
            yield Block(file, 0, content=digest.hexdigest())


def _chunks(file: File, digest: Any) -> Iterator[bytes]:
    """The file's bytes, decompressed."""
    fs, path = open_fs(file.url, "SOURCES")
    packed = COMPRESSED.get(name_of(path).lower().rpartition(".")[2])
    try:
        with fs.open(path, "rb", compression=packed) as stream:
            while chunk := stream.read(READ):
                digest.update(chunk)
                yield chunk
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if packed is None or unread(error):
            raise
        raise UserError(f"{file.shown}: cannot be unpacked ({error}): get the file again") from error


def pieces_of(block: Block, options: Options, bad: list[str], most_bad: int) -> Iterator[Piece]:
    """The pieces of a block. JSON is parsed here, in the process that encodes it.

    bad: the problem of each line that is left out is appended here; the block ends when there are more than most_bad.
    """
    if block.file.form == "jsonl":
        for text in _json_texts(block, options, bad, most_bad):
            yield from _with_split(_pieces(text, options), options)
    else:
        yield from _with_split(block.pieces, options)


def _with_split(pieces: Iterable[Piece], options: Options) -> Iterator[Piece]:
    for text, ends, validation in pieces:
        yield Piece(text, ends, is_validation(text, options.val_fraction) if validation is None else validation)


def _pieces(document: str, options: Options) -> Iterator[Piece]:
    if not document:  # an empty document is left out
        return
    *most, last = bpe.pieces(_clean(document))
    validation = is_validation(most[0], options.val_fraction) if most else None
    yield from (Piece(piece, False, validation) for piece in most)
    yield Piece(last, True, validation)


def _clean(text: str) -> str:
    """Replace lone surrogates, which JSON may hold and no tokenizer takes, by U+FFFD, as tiktoken does."""
    with suppress(UnicodeEncodeError):
        text.encode()
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --- text ---


def _text_blocks(file: File, chunks: Iterable[bytes], options: Options) -> Iterator[Block]:
    pieces, characters, size = list[Piece](), 0, 0
    validation: bool | None = None  # whether the long document that is under way validates; None: none is under way
    for text, ends, read in _cut(_decoded(file, chunks), options.separator):
        if text or (ends and validation is not None):  # an empty document is left out
            if validation is None and not ends:
                validation = is_validation(text, options.val_fraction)
            pieces.append(Piece(text, ends, validation))
            characters += len(text)
            validation = None if ends else validation
        size += read
        if characters >= READ:
            yield Block(file, size, tuple(pieces))
            pieces, characters, size = [], 0, 0
    yield Block(file, size, tuple(pieces))


def _decoded(file: File, chunks: Iterable[bytes]) -> Iterator[tuple[str, int]]:
    """Yield each chunk's characters and number of bytes. A character may begin in one chunk and end in the next."""
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    for chunk in chain(chunks, [b""]):
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            at = position - pending + error.start
            raise UserError(f"{file.shown}: not UTF-8 at byte {at}: convert the file") from error
        position += len(chunk)
        yield text, len(chunk)


def _cut(decoded: Iterable[tuple[str, int]], separator: str) -> Iterator[tuple[str, bool, int]]:
    """Cut at the separator, and long documents into bpe.pieces: (text, whether the document ends, bytes read)."""
    rest = ""
    for text, read in decoded:
        *documents, rest = (rest + text).split(separator) if separator else [rest + text]
        for document in documents:
            if len(document) <= bpe.PIECE:  # the usual case, made fast
                yield document, True, 0
                continue
            *most, last = bpe.pieces(document)
            yield from ((piece, False, 0) for piece in most)
            yield last, True, 0
        # Keep enough of the end for a separator that has begun in this chunk.
        while len(rest) > bpe.PIECE + len(separator):
            stop = bpe.cut(rest, 0)
            yield rest[:stop], False, 0
            rest = rest[stop:]
        yield "", False, read
    *most, last = bpe.pieces(rest)
    yield from ((piece, False, 0) for piece in most)
    yield last, True, 0


# --- JSON lines ---


def _json_blocks(file: File, chunks: Iterable[bytes], options: Options) -> Iterator[Block]:
    number, rest = 1, list[bytes]()  # of the first line of the next block; the begun line
    for chunk in chunks:
        head, newline, tail = chunk.rpartition(b"\n")
        if not newline:
            rest.append(tail)
            if sum(map(len, rest)) > LONGEST_LINE:
                raise UserError(f"{file.shown} line {number}: longer than {LONGEST_LINE} bytes: are these JSON lines?")
            continue
        lines = b"".join([*rest, head])
        yield Block(file, len(lines) + 1, lines=lines, number=number)
        number += lines.count(b"\n") + 1
        rest = [tail]
    if lines := b"".join(rest):
        yield Block(file, len(lines), lines=lines, number=number)


def _json_texts(block: Block, options: Options, bad: list[str], most_bad: int) -> Iterator[str]:
    for number, line in enumerate(block.lines.split(b"\n"), block.number):
        if not line.strip():
            continue
        try:
            text = _json_text(line, f"{block.file.shown} line {number}", options)
        except UserError as error:
            bad.append(str(error))
            if len(bad) > most_bad:
                return
        else:
            yield text


def _json_text(line: bytes, where: str, options: Options) -> str:
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start} of the line: convert the file") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}): correct the line, or give another --form") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: {type(value).__name__} in place of an object: make each line an object {{…}}")
    if options.field not in value:
        there_are = ", ".join(map(repr, list(value)[:10])) or "none"
        raise UserError(f"{where}: no field {options.field!r}; there are {there_are}: name one with --field")
    if not isinstance(text := value[options.field], str):
        raise UserError(f"{where}: field {options.field!r} is not a string: name another with --field")
    return text


# --- Parquet ---


def _parquet_blocks(file: File, options: Options, digest: Any) -> Iterator[Block]:
    fs, path = open_fs(file.url, "SOURCES")
    with fs.open(path, "rb") as stream:
        rows, texts = parquet_column(stream, options.field, file.shown)
        share = file.size / max(1, rows)  # bytes of the file for each row, for the progress bar
        pieces, characters, count = list[Piece](), 0, 0
        for text in texts:
            content = text.encode()
            digest.update(len(content).to_bytes(8, "little") + content)
            pieces += _pieces(text, options)
            characters, count = characters + len(text), count + 1
            if characters >= READ:
                yield Block(file, int(share * count), tuple(pieces))
                pieces, characters, count = [], 0, 0
        yield Block(file, int(share * count), tuple(pieces))
