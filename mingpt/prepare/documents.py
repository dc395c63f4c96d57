"""Documents out of text files, JSON lines, CSV and Parquet, read as streams: files may be larger than memory.

A file is cut into blocks, which the encoding processes take one by one. How it is cut depends on its content alone.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from mingpt.cli.console import printable, say
from mingpt.data import bpe
from mingpt.errors import UserError
from mingpt.files.storage import install, open_fs, place, unread
from mingpt.prepare.sources import File

Texts = Iterator[tuple[str, bool]]  # pieces, and whether one ends its document

READ = 1 << 20  # characters that are read at a time, and about those of a block
LONGEST_LINE = 64 << 20  # bytes of a line of JSON; parsed, it may take 20 times as many
ROWS = 16  # of Parquet, that are unpacked at a time: each may be a long string
STRINGS = ("string", "large_string", "string_view")  # of Arrow
CHATS = {"messages", "answer", "conversations", "instruction"}  # keys of conversations, ours and others' (data/chat.py)
CURE = "correct it, or give another --form or --field"


@dataclass(frozen=True)
class Options:
    """What a document is, and which documents validate.

    separator: between the documents of a text file; empty: the file is one document. field: the field of a JSON
    object or the column of a table that holds the text. val_fraction: the share of documents that validate.
    """

    separator: str = ""
    field: str = "text"
    val_fraction: float = 0.0


class Piece(NamedTuple):  # there may be millions: a tuple is the fastest to send to another process
    """A document, or a part of a long one. ends: whether the document ends with this piece."""

    text: str
    ends: bool
    validation: bool


class Block(NamedTuple):
    """Some of a file's documents. number: the file's. last: whether it ends the file. read: the bytes of the file that
    were read by then.
    """

    file: File
    number: int
    pieces: list[Piece]
    last: bool
    read: int


def is_validation(first_piece: str, fraction: float) -> bool:
    """Choose a document's split by the hash of its first piece, which is all of it unless it is long.

    So the same text goes to the same split, whatever file it is in and whatever else is prepared with it.
    """
    if not fraction:
        return False
    return int.from_bytes(blake2b(first_piece.encode(), digest_size=8).digest(), "little") < fraction * 2**64


def blocks(files: Sequence[File], options: Options, first: int = 0) -> Iterator[Block]:
    """Yield the blocks of all files from number `first` on, at least one of each file.

    Raises UserError if a file is not of its form.
    """
    for number, file in enumerate(files[first:], first):
        with place("SOURCES", file.shown):
            yield from _blocks(file, number, options)


def _blocks(file: File, number: int, options: Options) -> Iterator[Block]:
    pieces, characters = list[Piece](), 0
    validation: bool | None = None  # whether the long document that is under way validates; None: none is under way
    fs, path = open_fs(file.url, "SOURCES")
    with fs.open(path, "rb") as raw:
        try:
            for text, ends in _texts(file, number, _unpacked(raw, file.packed), options):
                if not text and validation is None:  # an empty document is left out
                    continue
                if validation is None:
                    validation = is_validation(text, options.val_fraction)
                pieces.append(Piece(text, ends, validation))
                characters += len(text)
                validation = None if ends else validation
                if characters >= READ:
                    yield Block(file, number, pieces, False, raw.tell())
                    pieces, characters = [], 0
        except (EOFError, OSError, ValueError, zlib.error) as error:
            if unread(error):
                raise
            why = printable((str(error).splitlines() or [type(error).__name__])[0])
            raise UserError(f"{file.shown}: cannot be read as {file.form} ({why}): {CURE}, or get it again") from error
    yield Block(file, number, pieces, True, file.size)


def _pyarrow() -> Any:
    try:
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"CSV, Parquet and .zst need the package pyarrow: {install('parquet')}") from error
    return pyarrow


def _unpacked(raw: Any, packed: str) -> Any:
    if packed == "zst":
        return _pyarrow().CompressedInputStream(raw, "zstd")
    return gzip.open(raw) if packed == "gz" else raw


def _texts(file: File, number: int, stream: Any, options: Options) -> Texts:
    """Each document, and True; a long one in pieces, with True for the last one."""
    if file.form == "text":
        yield from _cut(
            io.TextIOWrapper(stream, "utf-8-sig", newline=""), options.separator, "" if number else file.shown
        )
    elif file.form == "jsonl":
        yield from _whole(_json_lines(stream, options.field, file.shown))
    else:
        yield from _whole((_csv_rows if file.form == "csv" else _parquet_rows)(stream, options.field))


def _whole(documents: Iterable[str]) -> Texts:
    for document in documents:
        *most, last = bpe.pieces([document])
        for piece in most:
            yield piece, False
        yield last, True


def _cut(stream: io.TextIOBase, separator: str, shown: str) -> Texts:
    """shown: of the first file, of which it is said that no separator is in it; empty: of others."""
    rest, found, begin = "", not (separator and shown), ""
    while text := stream.read(READ):
        *documents, rest = (rest + text).split(separator) if separator else [rest + text]
        found, begin = found or bool(documents), begin or text
        yield from _whole(documents)
        # Keep enough of the end for a separator that has begun in this chunk.
        while len(rest) > bpe.PIECE + len(separator):
            stop = bpe.cut(rest, 0)
            yield rest[:stop], False
            rest = rest[stop:]
    if not found:
        line_end = "".join(re.findall("\r\n?|\n", begin)[:1])
        say(f"prepare: {shown}: --separator {separator!r} is not in it, its lines end in {line_end!r}")
    yield from _whole([rest])


def _json_lines(stream: Any, field: str, shown: str) -> Iterator[str]:
    lines, number = io.BufferedReader(stream, READ), 0
    while line := lines.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise ValueError(f"line {number} is longer than {LONGEST_LINE} bytes")
        if not line.strip():
            continue
        try:
            text = _clean(_string(json.loads(line.strip()), field))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{shown} line {number}: cannot be read ({error}): {CURE}") from error
        yield text


def _csv_rows(stream: Any, field: str) -> Iterator[str]:
    """The first row has the columns' names. Raises ValueError: of a row with another number of cells."""
    csv = _pyarrow().csv
    text = {field: _pyarrow().string()}
    try:
        batches = csv.open_csv(
            stream,
            csv.ReadOptions(use_threads=False, block_size=LONGEST_LINE),
            csv.ParseOptions(newlines_in_values=True),
            csv.ConvertOptions(include_columns=[field], column_types=text, strings_can_be_null=False),
        )
    except KeyError as error:
        raise ValueError(f"no column {field!r}") from error
    for batch in batches:
        yield from (value.as_py() for value in batch.column(0))


def _parquet_rows(stream: Any, field: str) -> Iterator[str]:
    table = _pyarrow().parquet.ParquetFile(stream, buffer_size=READ)
    kinds = zip(table.schema_arrow.names, map(str, table.schema_arrow.types), strict=True)
    _string({name: kind in STRINGS and name for name, kind in kinds}, field)
    for batch in table.iter_batches(ROWS, columns=[field], use_threads=False):
        yield from (value.as_py() for value in batch.column(0) if value.is_valid)  # as_py: one string at a time


def _string(record: Any, field: str) -> str:
    found = record.get(field) if isinstance(record, dict) else None
    if not isinstance(found, str):
        there_are = ", ".join(map(repr, list(record)[:10])) if isinstance(record, dict) else ""
        chat = isinstance(record, dict) and record.keys() & CHATS
        hint = "; conversations need no shards: train on them with data=chat data.path=…" if chat else ""
        raise ValueError(f"no strings in the field {field!r}; there are {there_are or 'none'}{hint}")
    return found


def _clean(text: str) -> str:
    """Replace lone surrogates, which JSON may hold and no tokenizer takes, by U+FFFD."""
    with suppress(UnicodeEncodeError):
        text.encode()
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
