"""Documents out of text files, JSON lines and Parquet at any URL, read as streams: memory is bounded, files may not be.

A file is cut into blocks, which processes encode beside each other. How it is cut depends on its content alone.
"""

import codecs
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b, sha256
from itertools import chain
from typing import Any, Literal, NamedTuple

from mingpt.data import bpe
from mingpt.errors import UserError
from mingpt.prepare.parquet import parquet_column
from mingpt.redact import printable, without_secrets
from mingpt.storage import name_of, open_fs, place, without_query

Form = Literal["text", "jsonl", "parquet"]
FORMS: dict[str, Form] = {
    **dict.fromkeys(("txt", "text", "md"), "text"),
    **dict.fromkeys(("jsonl", "ndjson", "json"), "jsonl"),
    **dict.fromkeys(("parquet", "pq"), "parquet"),
}
COMPRESSED = {"gz": "gzip", "bz2": "bz2", "xz": "xz"}
# Of what the clients of stores say about a file, what changes with its content.
VERSION_KEYS = (
    "mtime", "LastModified", "last_modified", "Last-Modified", "updated", "modified", "ETag", "etag", "Content-MD5",
    "md5Hash", "generation", "VersionId",
)  # fmt: skip
READ = 1 << 20  # bytes that are read, and about as many that a block has
LONGEST_LINE = 64 << 20  # bytes of a line of JSON, which may take 20 times as many once it is read


@dataclass(frozen=True)
class Options:
    """What the documents of a file are: pieces between separators, the strings of a field or of a column."""

    separator: str = ""
    field: str = "text"
    val_fraction: float = 0.0


@dataclass(frozen=True)
class File:
    """version: what the store says that changes with the content (times, ETags); empty if it says nothing."""

    url: str
    form: Form
    size: int
    version: str = ""

    @property
    def shown(self) -> str:
        return printable(str(without_secrets(self.url)))


class Piece(NamedTuple):  # there may be millions, and a tuple travels fastest to another process
    """A document, or a part of a long one. ends: whether the document does. validation: whether it is for that; None
    for a whole document, whose hash says it, where it is encoded."""

    text: str
    ends: bool
    validation: bool | None


@dataclass(frozen=True)
class Block:
    """Part of a file. Of text and Parquet the pieces; of JSON the lines, from that number on.

    size: the bytes of the file that it stands for.
    """

    file: File
    size: int
    pieces: tuple[Piece, ...] = ()
    lines: bytes = b""
    number: int = 0


def find_files(sources: Sequence[str], form: Form | None) -> list[File]:
    """The files that URLs and globs name, each once, in order: that of the sources, sorted within a glob."""
    found: dict[str, File] = {}
    for source in sources:
        fs, path = open_fs(source, "SOURCES")
        shown = f"SOURCES={without_secrets(source)}"
        with place("SOURCES", source):
            if any(c in without_query(path) for c in "*?[") and not fs.exists(path):
                urls = {p: fs.unstrip_protocol(p) for p in sorted(fs.glob(path)) if not fs.isdir(p)}
            else:
                urls = {path: source}
            if not urls:
                raise UserError(f"{shown}: no file is there: check the spelling")
            for p, url in urls.items():
                info = fs.info(p)
                if info["type"] == "directory":
                    raise UserError(f"{shown}: a folder: name the files in it, as in {url.rstrip('/')}/*.txt")
                found.setdefault(url, File(url, form or _form_of(p, shown), info["size"] or 0, _version_of(info)))
    return list(found.values())


def _form_of(path: str, shown: str) -> Form:
    parts = name_of(path).lower().split(".")
    suffix = parts[-2] if parts[-1] in COMPRESSED and len(parts) > 2 else parts[-1]
    if suffix not in FORMS:
        raise UserError(f"{shown}: .{printable(suffix)} tells no form: say --form text, jsonl or parquet")
    return FORMS[suffix]


def _version_of(info: Mapping[str, Any]) -> str:
    known = [[key, str(info[key])] for key in VERSION_KEYS if info.get(key)]
    return json.dumps(known or [["created", str(info["created"])]]) if known or info.get("created") else ""


def identity_of(url: str) -> str:
    """What says which file an address means, without its folder.

    What follows the name of a text or its like may be a signature, and another tomorrow; `download?id=7` has no name.
    """
    path, name = without_query(url), name_of(url)
    suffixes = set(name.lower().split(".")[1:])
    return name if suffixes & (FORMS.keys() | COMPRESSED.keys()) else name + url[len(path) :]


def is_validation(first_piece: str, fraction: float) -> bool:
    """By the hash of a document's first piece (all of it, if it is not longer than a piece): the same text always goes
    to the same split, whatever file it is in and whatever is prepared beside it."""
    if not fraction:
        return False
    digest = blake2b(first_piece.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def blocks(file: File, options: Options, contents: dict[str, str]) -> Iterator[Block]:
    """The file's blocks in order, and then in `contents`, under its URL, the hash of what was read.

    Raises UserError if it is not of its form.
    """
    digest = sha256()
    with place("SOURCES", file.shown):
        if file.form == "parquet":
            yield from _rows(file, options, digest)
        else:
            yield from (_lines if file.form == "jsonl" else _texts)(file, _chunks(file, digest), options)
    contents[file.url] = digest.hexdigest()


def _chunks(file: File, digest: Any) -> Iterator[bytes]:
    """The file's bytes, unpacked."""
    fs, path = open_fs(file.url, "SOURCES")
    packed = COMPRESSED.get(name_of(path).lower().rpartition(".")[2])
    try:
        with fs.open(path, "rb", compression=packed) as stream:
            while chunk := stream.read(READ):
                digest.update(chunk)
                yield chunk
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of what is on it
            raise
        if packed is None:
            raise
        raise UserError(f"{file.shown}: cannot be unpacked ({error}): get the file again") from error


def pieces_of(block: Block, options: Options, bad: list[str], most_bad: int) -> Iterator[Piece]:
    """What a block has to encode; JSON is read here, in the process that encodes it.

    bad: gets what is wrong with a line that is left out; the block ends when there are more than most_bad.
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
    if not document:  # an empty document is none
        return
    *most, last = bpe.pieces(_clean(document))
    validation = is_validation(most[0], options.val_fraction) if most else None
    yield from (Piece(piece, False, validation) for piece in most)
    yield Piece(last, True, validation)


def _clean(text: str) -> str:
    """JSON may hold half a character (a surrogate), which is no Unicode; as tiktoken does, it becomes U+FFFD."""
    with suppress(UnicodeEncodeError):
        text.encode()
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --- text ---


def _texts(file: File, chunks: Iterable[bytes], options: Options) -> Iterator[Block]:
    pieces, characters, size = list[Piece](), 0, 0
    validation: bool | None = None  # of the long document that the next piece belongs to; None: it begins one
    for text, ends, read in _cut(_decoded(file, chunks), options.separator):
        if text or (ends and validation is not None):  # an empty document is none
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
    """Characters, and the bytes that they were."""
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
    """(text, whether the document ends with it, bytes read for it): documents, long ones in bpe.pieces."""
    rest = ""
    for text, read in decoded:
        *documents, rest = (rest + text).split(separator) if separator else [rest + text]
        for document in documents:
            if len(document) <= bpe.PIECE:  # nearly all are
                yield document, True, 0
                continue
            *most, last = bpe.pieces(document)
            yield from ((piece, False, 0) for piece in most)
            yield last, True, 0
        # Of a separator, only less than all of it may be at the end.
        while len(rest) > bpe.PIECE + len(separator):
            stop = bpe.cut(rest, 0)
            yield rest[:stop], False, 0
            rest = rest[stop:]
        yield "", False, read
    *most, last = bpe.pieces(rest)
    yield from ((piece, False, 0) for piece in most)
    yield last, True, 0


# --- JSON lines ---


def _lines(file: File, chunks: Iterable[bytes], options: Options) -> Iterator[Block]:
    number, rest = 1, list[bytes]()
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
        except UserError as mistake:
            bad.append(str(mistake))
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
        raise UserError(f"{where}: not JSON ({error}): mend the line, or say another --form") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: {type(value).__name__} in place of an object: each line must be {{…}}")
    if options.field not in value:
        there_are = ", ".join(map(repr, list(value)[:10])) or "none"
        raise UserError(f"{where}: no field {options.field!r}; there are {there_are}: name one with --field")
    if not isinstance(text := value[options.field], str):
        raise UserError(f"{where}: field {options.field!r} is no string: name another with --field")
    return text


# --- Parquet ---


def _rows(file: File, options: Options, digest: Any) -> Iterator[Block]:
    fs, path = open_fs(file.url, "SOURCES")
    with fs.open(path, "rb") as stream:
        rows, texts = parquet_column(stream, options.field, file.shown)
        share = file.size / max(1, rows)  # bytes that a row stands for
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
