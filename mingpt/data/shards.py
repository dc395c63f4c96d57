"""Token shards as a source: what `mingpt prepare` wrote, or a folder with nanoGPT's train.bin and val.bin.

A split is one sequence of tokens, wherever its shards end. Shards on a local path are memory-mapped in place. From
anywhere else, each is fetched when a sample first needs it, into a bounded cache of the node (shardcache.py).
"""

import json
from collections.abc import Sequence
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mingpt.config.datasets import ShardsData
from mingpt.data.bpe import read_tokenizer
from mingpt.data.cache import ArrayFile, cached
from mingpt.data.dataset import AGAIN, MANIFEST, SPLITS, DataSet, Scan, Shard, from_bytes, scan, tokens_in
from mingpt.data.shardcache import ShardCache
from mingpt.data.source import Source, Vocabulary
from mingpt.data.vocabulary import Numbers, vocabulary_of
from mingpt.data.windows import Apart, EvalChunks, PaddedBatches, training_windows
from mingpt.errors import UserError
from mingpt.files.folder import Folder
from mingpt.files.localfile import open_cached
from mingpt.files.storage import fetch_it, place

NANOGPT = ("train.bin", "val.bin")


class ShardedTokens:
    """The tokens of a split's shards, one after the other. home: the local folder of the shards, or a node's cache."""

    def __init__(self, shards: Sequence[Shard], dtype: str, home: Path | ShardCache) -> None:
        self.shards, self.dtype, self.home = list(shards), np.dtype(dtype).newbyteorder("<"), home
        self.stops = np.cumsum([0, *(shard.tokens for shard in shards)])[1:]
        self._mapped: dict[int, NDArray[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": {}}

    def __len__(self) -> int:
        return tokens_in(self.shards)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        found: list[NDArray[Any]] = []
        i = int(np.searchsorted(self.stops, start, side="right"))
        while start < stop:
            begin = int(self.stops[i]) - self.shards[i].tokens
            tokens = self._map(i)[start - begin : stop - begin]
            found.append(tokens)
            start += len(tokens)
            i += 1
        return found[0] if len(found) == 1 else np.concatenate(found or [np.empty(0, self.dtype)])

    def _map(self, i: int) -> NDArray[Any]:
        shard, home = self.shards[i], self.home
        known = self._mapped.get(i)
        if isinstance(home, Path):
            if known is None:
                with open(open_cached(str(home), shard.name), "rb") as file:
                    known = self._mapped[i] = np.memmap(file, dtype=self.dtype, mode="r")
        elif known is None or not home.has(shard):
            # Unmap the shards that another process has deleted from the cache: the disk frees their bytes only then.
            self._mapped = {k: m for k, m in self._mapped.items() if home.path(self.shards[k]).exists()}
            known = self._mapped[i] = home.open(shard, self.dtype)
        return known


def open_shards(config: ShardsData, block_size: int, micro_size: int, vocabulary: Vocabulary | None = None) -> Source:
    """Raises UserError if there is no data set, if it is damaged, too short, or not in the given vocabulary."""
    folder = Folder(config.path, "data.path")
    shown = folder.shown
    with place("data.path", config.path):
        raw = folder.read(MANIFEST)
        if raw is not None:
            dataset = from_bytes(raw, shown)
            own: Vocabulary = vocabulary_of(dataset.tokenizer)
            if folder.local:
                _check_files(config, folder, dataset, own.size)
        elif all(folder.fs.exists(folder.path(name)) for name in NANOGPT):
            dataset, own = _nanogpt(config, folder, vocabulary)
        else:
            cure = "give the folder that `mingpt prepare` has written, or one with nanoGPT's train.bin and val.bin"
            raise UserError(f"{shown}: no data set is there (no {MANIFEST}): {cure}{fetch_it(config.path)}")
    _check_vocabulary(config, own, vocabulary)
    cache = Path(config.cache_dir).expanduser() / "shards"
    home = Path(folder.root) if folder.local else ShardCache(
        config.path, cache, config.cache_bytes, config.cache_timeout_seconds, own.size
    )  # fmt: skip
    train, validation = (ShardedTokens(dataset.of(split), dataset.dtype, home) for split in SPLITS)
    windows = training_windows(train, len(train), block_size, config.stride, shown)
    content = [own.to_json(), [[shard.split, shard.tokens, shard.sha256] for shard in dataset.shards]]
    identity = sha256(json.dumps(content).encode()).hexdigest()
    chunks = EvalChunks(validation, 0, len(validation), block_size)
    if config.documents == "joined":
        return Source(windows, PaddedBatches(chunks, micro_size), own, identity)
    if (end := getattr(own, "end_of_text", None)) is None:
        raise UserError(f"{shown}: data.documents=apart, but its vocabulary has no end of text: set data.tokenizer")
    return Source(Apart(windows, end), PaddedBatches(Apart(chunks, end), micro_size), own, identity)


def _check_vocabulary(config: ShardsData, own: Vocabulary, wanted: Vocabulary | None) -> None:
    shown = f"data.path={config.path}"
    if config.tokenizer is not None and own.to_json() != read_tokenizer(config.tokenizer, "data.tokenizer").to_json():
        raise UserError(f"{shown}: its vocabulary is not that of data.tokenizer: leave data.tokenizer out")
    if wanted is not None and own.to_json() != wanted.to_json():
        raise UserError(f"{shown}: its vocabulary is not the snapshot's: prepare the text with that one")


def _check_files(config: ShardsData, folder: Folder, dataset: DataSet, vocabulary: int) -> None:
    """Read a local data set once at the start, so that a damaged shard can't end the run later. Raises UserError."""
    names, problems = [shard.name for shard in dataset.shards], list[str]()
    for name in names:
        if not folder.fs.exists(folder.path(name)):
            problems.append(f"{folder.shown}: {name} is missing: {AGAIN}")
    if problems:
        raise UserError(*problems)
    for shard, file in zip(dataset.shards, _scanned(config, folder, names, dataset.dtype), strict=True):
        if why := file.damage(shard, dataset.dtype) or file.beyond(vocabulary):
            problems.append(f"{folder.shown}: {shard.name} {why}: {AGAIN}")
    if problems:
        raise UserError(*problems)


def _nanogpt(config: ShardsData, folder: Folder, wanted: Vocabulary | None) -> tuple[DataSet, Vocabulary]:
    """nanoGPT's files as a data set: 16-bit tokens, whose vocabulary only data.tokenizer or a snapshot knows."""
    shown, shards, largest = folder.shown, list[Shard](), 0
    files = _scanned(config, folder, NANOGPT, "uint16")
    for name, split, file in zip(NANOGPT, SPLITS, files, strict=True):
        if not file.size or file.size % 2:
            raise UserError(f"{shown}: {name} has {file.size} bytes, which are no 16-bit tokens: make it again")
        shards.append(Shard(name=name, split=split, tokens=file.size // 2, documents=0, sha256=file.sha256))
        largest = max(largest, file.largest)
    own = wanted or (read_tokenizer(config.tokenizer, "data.tokenizer") if config.tokenizer else Numbers(largest + 1))
    if largest >= own.size:
        raise UserError(
            f"{shown}: has token {largest}, but the vocabulary only {own.size}: set data.tokenizer to the one that "
            "made these files"
        )
    return DataSet(dtype="uint16", tokenizer=own.to_json(), made_from="0" * 64, shards=tuple(shards)), own


def _scanned(config: ShardsData, folder: Folder, names: Sequence[str], dtype: str) -> list[Scan]:
    """Scan each file. One process of the node does it, and again only when the files have changed."""

    def scans(_: ArrayFile) -> dict[str, Any]:
        found = list[Scan]()
        with place("data.path", config.path):
            for name in names:
                with folder.open_to_read(name) as file:
                    found.append(scan(file, dtype))
        return {"scans": [astuple(each) for each in found]}

    fs = folder.fs
    identity = ["shards", fs.unstrip_protocol(folder.root), dtype, *(fs.info(folder.path(name)) for name in names)]
    return [Scan(*each) for each in cached(config, identity, scans)[1]["scans"]]
