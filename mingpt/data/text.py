"""Character and byte tokens from any text at any URL, cached once per node as a memory-mapped array."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mingpt.config import Data, without_secrets
from mingpt.errors import Mistake
from mingpt.model import IGNORE
from mingpt.storage import open_fs, place

CACHE_VERSION = 1  # raise when what is cached changes


@dataclass(frozen=True)
class Vocabulary:
    """Characters in code-point order (kind "char"), or all 256 bytes (kind "byte", no characters)."""

    kind: str
    characters: str = ""

    @property
    def size(self) -> int:
        return len(self.characters) if self.kind == "char" else 256

    def encode(self, text: str) -> list[int]:
        """Raises Mistake if the text has characters that the vocabulary lacks."""
        if self.kind == "byte":
            try:
                return list(text.encode(errors="surrogateescape"))  # how Python hands over bytes that aren't UTF-8
            except UnicodeEncodeError as error:
                raise Mistake(f"the text is no Unicode: {error}") from error
        ids = {c: i for i, c in enumerate(self.characters)}
        if unknown := sorted(set(text) - set(ids)):
            raise Mistake(f"the text has characters that the model never saw: {''.join(unknown)!r}")
        return [ids[c] for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        if self.kind == "byte":
            return bytes(ids).decode(errors="replace")
        return "".join(self.characters[i] for i in ids)

    def to_json(self) -> dict[str, str]:
        return {"kind": self.kind, "characters": self.characters}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Vocabulary":
        return cls(kind=str(value["kind"]), characters=str(value["characters"]))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Samples of a fixed length from a split [start, stop) of a token file; sample i starts at start + i * stride.

    Opened anew in each loader process: only the path travels, the pages are shared by all processes of the node.
    """

    def __init__(self, path: Path, start: int, stop: int, block_size: int, stride: int) -> None:
        self.path, self.start, self.stop, self.block_size, self.stride = path, start, stop, block_size, stride
        self._tokens: NDArray[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokens": None}

    @property
    def tokens(self) -> NDArray[Any]:
        if self._tokens is None:
            self._tokens = np.load(self.path, mmap_mode="r")
        return self._tokens

    def __len__(self) -> int:
        """Samples that are whole: block_size tokens and the one after."""
        return max(0, (self.stop - self.start - self.block_size - 1) // self.stride + 1)

    def __getitem__(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A microbatch: (tokens, targets), each (len(ids), block_size) int64."""
        starts = self.start + np.asarray(ids, dtype=np.int64)[:, None] * self.stride
        rows = torch.from_numpy(self.tokens[starts + np.arange(self.block_size + 1)].astype(np.int64))
        return rows[:, :-1], rows[:, 1:]


class Pieces:
    """A whole split as consecutive pieces of block_size, each target once; the last ones filled up with IGNORE."""

    def __init__(self, windows: Windows, micro_size: int) -> None:
        self.windows, self.micro_size = windows, micro_size
        self.targets = max(0, windows.stop - windows.start - 1)
        self.microbatches = -(-self.targets // (windows.block_size * micro_size))

    def __len__(self) -> int:
        """Microbatches."""
        return self.microbatches

    def __getitem__(self, microbatch: int) -> tuple[Tensor, Tensor]:
        """(tokens, targets) of one microbatch, each (micro_size, block_size) int64."""
        size = self.micro_size * self.windows.block_size
        start = self.windows.start + microbatch * size
        run = self.windows.tokens[start : min(start + size + 1, self.windows.stop)].astype(np.int64)
        tokens = torch.zeros(size, dtype=torch.int64)
        targets = torch.full((size,), IGNORE, dtype=torch.int64)
        tokens[: len(run) - 1] = torch.from_numpy(run[:-1])
        targets[: len(run) - 1] = torch.from_numpy(run[1:])
        shape = (self.micro_size, self.windows.block_size)
        return tokens.view(shape), targets.view(shape)


@dataclass(frozen=True)
class Text:
    """A text as the trainer sees it. `sha256` is that of the file's bytes."""

    train: Windows
    validation: Windows
    vocabulary: Vocabulary
    sha256: str


def _tokenize(raw: bytes, config: Data) -> tuple[NDArray[Any], Vocabulary]:
    shown = f"data.path={without_secrets(config.path)}"
    if not raw:
        raise Mistake(f"{shown}: the file is empty: name another")
    if config.tokens == "byte":
        return np.frombuffer(raw, dtype=np.uint8), Vocabulary("byte")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise Mistake(f"{shown}: not UTF-8 at byte {error.start}: convert the file, or use data.tokens=byte") from error
    points, ids = np.unique(np.frombuffer(text.encode("utf-32-le"), dtype="<u4"), return_inverse=True)
    if len(points) < 2:
        raise Mistake(
            f"{shown}: only one character, {chr(points[0])!r}, over and over: nothing to learn; name another text"
        )
    smallest = np.uint8 if len(points) <= 2**8 else np.uint16 if len(points) <= 2**16 else np.uint32
    return ids.reshape(-1).astype(smallest), Vocabulary("char", "".join(map(chr, points)))


def _commit(path: Path, content: bytes | NDArray[Any]) -> None:
    """Write a file of the cache so that it is there whole or not at all."""
    with NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as f:
        try:
            if isinstance(content, bytes):
                f.write(content)
            else:
                np.save(f, content)
            f.flush()
            os.fsync(f.fileno())
            os.replace(f.name, path)
        except BaseException:
            os.unlink(f.name)
            raise


def _cached(config: Data) -> tuple[Path, dict[str, Any]]:
    """The token file of `config.path` and what is known of it, tokenized by whichever process comes first."""
    fs, remote = open_fs(config.path, "data.path")
    with place("data.path", config.path):
        if fs.isdir(remote):
            raise Mistake(f"data.path={without_secrets(config.path)}: a folder; name one text file")
        info = fs.info(remote)  # size, modification time, ETag: a changed file gets another name in the cache
        if info["type"] == "other":  # a pipe or a device may never end
            raise Mistake(f"data.path={without_secrets(config.path)}: no regular file; name one text file")
    source = [CACHE_VERSION, config.tokens, fs.unstrip_protocol(remote), info]
    identity = json.dumps(source, sort_keys=True, default=str)
    folder = Path(config.cache_dir).expanduser()
    stem = folder / f"text-{sha256(identity.encode()).hexdigest()[:32]}"
    tokens, about = stem.with_suffix(".npy"), stem.with_suffix(".json")
    with place("data.cache_dir", str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(stem.with_suffix(".lock"), timeout=config.cache_timeout_seconds):
                if not (about.exists() and tokens.exists()):
                    with place("data.path", config.path):
                        raw = fs.cat_file(remote)
                    array, vocabulary = _tokenize(raw, config)
                    _commit(tokens, array)
                    known = {"vocabulary": vocabulary.to_json(), "sha256": sha256(raw).hexdigest()}
                    # Last: its presence says that the tokens are whole.
                    _commit(about, json.dumps(known | {"tokens": len(array)}).encode())
        except Timeout:
            raise Mistake(
                f"another process of this node has been tokenizing data.path for {config.cache_timeout_seconds:.0f} s "
                f"(lock {stem}.lock): if it is alive, raise data.cache_timeout_seconds"
            ) from None
        try:
            return tokens, json.loads(about.read_text())
        except ValueError as error:
            raise Mistake(f"data.cache_dir={folder}: {about.name} is damaged: delete it") from error


def open_text(config: Data, block_size: int) -> Text:
    """Tokenize (once per node) and split: the first part trains, the rest validates; no sample crosses the border.

    Raises Mistake if the text can't be read, isn't text, or is too short for block_size.
    """
    path, about = _cached(config)
    border = round(about["tokens"] * (1 - config.val_fraction))
    train = Windows(path, 0, border, block_size, config.stride)
    validation = Windows(path, border, about["tokens"], block_size, config.stride)
    if len(train) == 0:
        raise Mistake(
            f"model.block_size={block_size} is longer than the data: data.path={without_secrets(config.path)} has "
            f"{border} training tokens, and a sample takes {block_size + 1}: lower model.block_size or take more text"
        )
    if config.val_fraction and about["tokens"] - border < 2:
        raise Mistake(
            f"data.val_fraction={config.val_fraction:g} of the {about['tokens']} tokens of "
            f"data.path={without_secrets(config.path)} leaves nothing to validate on: raise it, or set it to 0"
        )
    return Text(train, validation, Vocabulary.from_json(about["vocabulary"]), about["sha256"])
