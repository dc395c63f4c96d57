"""mingpt.data.shards: the same tokens however they are cut and wherever they lie, and damage that is told in a line."""

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from filelock import FileLock

from mingpt.compute.batches import BatchPlan, RankSampler
from mingpt.config.datasets import ShardsData
from mingpt.data.dataset import DataSet
from mingpt.data.loader import load
from mingpt.data.shards import open_shards
from mingpt.data.source import Source, Vocabulary
from mingpt.data.vocabulary import Characters, Numbers
from mingpt.errors import UserError
from tests.kits import bpe_kit
from tests.kits.prepare_kit import VOCABULARY, expected, prepared, some_texts, write_jsonl
from tests.kits.told import Told
from tests.kits.web_kit import served

TEXTS = some_texts(20)
TRAIN, VALIDATION = (expected(TEXTS, 0.1, split) for split in ("train", "validation"))


def write(folder: Path, shard_tokens: int = 300) -> DataSet:
    source = write_jsonl(folder.parent / "texts.jsonl", TEXTS)
    return prepared([source], folder, val_fraction=0.1, shard_tokens=shard_tokens)


def change(folder: Path, **fields: object) -> None:
    """In its manifest: of the first shard what a shard has, all else of the data set."""
    content = json.loads((folder / "manifest.json").read_text())
    (content["shards"][0] if {"name", "tokens"} & fields.keys() else content).update(fields)
    (folder / "manifest.json").write_text(json.dumps(content))


def opened(path: Path | str, tmp_path: Path, vocabulary: Vocabulary | None = None, **changes: object) -> Source:
    data = {"path": str(path), "cache_dir": str(tmp_path / "cache")} | changes
    return open_shards(ShardsData.model_validate(data), 16, 2, vocabulary)


def samples(source: Source) -> list[list[int]]:
    return [source.train[[i]][0][0].tolist() for i in range(len(source.train))]


@pytest.mark.parametrize("shard_tokens", [7, 300, 1 << 20])
def test_the_samples_are_the_same_however_the_shards_are_cut(tmp_path: Path, shard_tokens: int) -> None:
    shards = write(tmp_path / "set", shard_tokens).shards
    source = opened(tmp_path / "set", tmp_path, stride=3)
    assert samples(source) == [TRAIN[i : i + 16] for i in range(0, len(TRAIN) - 16, 3)]
    pieces = [source.validation[i][1].flatten() for i in range(len(source.validation))]
    assert [t for piece in pieces for t in piece.tolist() if t != -100] == VALIDATION[1:]
    assert source.vocabulary == VOCABULARY
    assert len(pickle.dumps(source.train)) < 3000 + 200 * len(shards)  # local shards travel as a path
    assert not (tmp_path / "cache" / "shards").exists()
    (tmp_path / "set").rename(tmp_path / "moved")
    assert opened(tmp_path / "moved", tmp_path).sha256 == source.sha256
    change(tmp_path / "moved", tokenizer=Numbers(272).to_json())
    assert opened(tmp_path / "moved", tmp_path).sha256 != source.sha256


def test_nanogpts_files_are_read_as_they_are(tmp_path: Path) -> None:
    (folder := tmp_path / "nano").mkdir()
    for name, tokens in (("train.bin", TRAIN), ("val.bin", VALIDATION)):
        (folder / name).write_bytes(np.array(tokens, "<u2").tobytes())
    source = opened(folder, tmp_path)
    assert samples(source) == [TRAIN[i : i + 16] for i in range(len(TRAIN) - 16)]
    largest = max(*TRAIN, *VALIDATION)
    assert source.vocabulary == Numbers(largest + 1)
    tokenizer = bpe_kit.write_gpt2(tmp_path / "gpt2")
    assert opened(folder, tmp_path, tokenizer=str(tokenizer)).vocabulary == VOCABULARY
    with pytest.raises(UserError, match=rf"token {largest}.*set data\.tokenizer"):
        opened(folder, tmp_path, Characters("abc"))
    with pytest.raises(UserError, match=r"data\.documents=apart"):  # its end of text is not known
        opened(folder, tmp_path, documents="apart")
    (folder / "val.bin").write_bytes(b"abc")
    with pytest.raises(UserError, match=r"val\.bin has 3 bytes"):
        opened(folder, tmp_path)


# --- from an object store ---


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    """The URL of the folder tmp_path/remote on a web server."""
    (tmp_path / "remote").mkdir()
    with served(tmp_path / "remote") as url:
        yield f"{url}/set"


def cached(tmp_path: Path) -> dict[str, int]:
    """The sizes of the shards in the cache, also of unfinished ones."""
    found = (tmp_path / "cache" / "shards").iterdir()
    return {path.stem: path.stat().st_size for path in found if path.suffix in (".bin", ".part")}


@pytest.mark.parametrize("limit", [10_000, 1300, 600])
def test_shards_are_fetched_into_a_bounded_folder(tmp_path: Path, remote: str, limit: int) -> None:
    shards = write(tmp_path / "remote" / "set").of("train")
    killed = tmp_path / "cache" / "shards" / f"{'0' * 64}.900.part"  # of a process that is gone
    killed.parent.mkdir(parents=True)
    killed.touch()
    source = opened(remote, tmp_path, cache_bytes=limit, stride=7)
    order = np.random.default_rng(3).permutation(len(source.train))
    for i in order[:60].tolist():
        assert source.train[[i]][0][0].tolist() == TRAIN[7 * i : 7 * i + 16]
        assert sum(cached(tmp_path).values()) <= limit
    assert not killed.exists()
    if limit == 10_000:  # all of it is there: the store is needed no more
        fsspec.filesystem("http").invalidate_cache()
        (tmp_path / "remote" / "set").rename(tmp_path / "gone")
        assert len(samples(source)) == len(source.train)
        assert cached(tmp_path).keys() == {shard.sha256 for shard in shards}


@pytest.mark.parametrize("kind", ["flipped", "truncated", "missing"])
def test_a_damaged_shard_is_a_mistake_and_not_kept(tmp_path: Path, remote: str, kind: str, told: Told) -> None:
    _, damaged, *_ = write(folder := tmp_path / "remote" / "set").shards
    opened(folder, tmp_path)  # it was good once, and is read again only if it changes
    source = opened(remote, tmp_path, stride=100)
    content = (folder / damaged.name).read_bytes()
    (folder / damaged.name).unlink()
    if kind != "missing":
        (folder / damaged.name).write_bytes(content[:-2] if kind == "truncated" else b"x" + content[1:])
    with told.mistake(tmp_path):
        opened(folder, tmp_path)
    work = RankSampler(BatchPlan(len(source.train), 1, 8, 8), range(1), 0, 3)
    with told.mistake(remote.removesuffix("/set")):
        list(load(source.train, work, 0, 600, torch.device("cpu")))
    assert damaged.sha256 not in cached(tmp_path)


def test_a_cached_file_that_is_not_its_shard_is_fetched_again(tmp_path: Path, remote: str) -> None:
    """As after a power cut."""
    write(tmp_path / "remote" / "set")
    for content in (b"", bytes(600), b""):
        assert opened(remote, tmp_path).train[[0]][0].tolist() == [TRAIN[:16]]
        [file] = (tmp_path / "cache" / "shards").glob("*.bin")
        file.write_bytes(content)


def test_a_cached_shard_is_read_without_its_lock(tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another user, and on a disk that can only be read, where one can neither take it nor change the time."""

    def refuse(path: Path) -> None:
        raise PermissionError(path)

    write(tmp_path / "remote" / "set")
    opened(remote, tmp_path).train[[0]]
    [file] = (tmp_path / "cache" / "shards").glob("*.bin")
    monkeypatch.setattr(os, "utime", refuse)
    with FileLock(file.with_suffix(".lock")):
        source = opened(remote, tmp_path, cache_timeout_seconds=0.05)
        assert source.train[[0, 1]][0].tolist() == [TRAIN[:16], TRAIN[1:17]]


def test_a_server_that_sends_more_than_a_shard_is_not_read_to_its_end(tmp_path: Path, remote: str) -> None:
    write(folder := tmp_path / "remote" / "set")
    with open(folder / "train-00000.bin", "ab") as f:
        f.truncate(1 << 30)
    with pytest.raises(UserError, match=r"train-00000\.bin has more than 600 bytes"):
        opened(remote, tmp_path).train[[0]]
    assert cached(tmp_path) == {}
    with pytest.raises(UserError, match=r"^data\.cache_bytes=599 "):
        opened(remote, tmp_path, cache_bytes=599).train[[0]]


# --- mistakes ---


@pytest.mark.parametrize(
    "fields",
    [
        {"format": "mingpt-shards-2"},
        {"shards": None},
        {"\x1b[2J\nerror": 1},
        {"name": "../train-00000.bin"},
        {"name": "/etc/passwd"},
        {"tokens": -1},
    ],
    ids=str,
)
def test_a_strangers_manifest_leads_nowhere(tmp_path: Path, fields: dict[str, Any], told: Told) -> None:
    write(tmp_path / "set")
    change(tmp_path / "set", **fields)
    with told.mistake(tmp_path):
        opened(tmp_path / "set", tmp_path)


def test_what_does_not_match_is_a_mistake(tmp_path: Path, remote: str, told: Told) -> None:
    write(folder := tmp_path / "remote" / "set")
    opened(remote, tmp_path).train[[0]]  # a data set of a larger vocabulary leaves it in the cache
    tokenizer: dict[str, Any] = {"tokenizer": str(bpe_kit.write_tokenizer(tmp_path / "hf"))}
    said = list[str]()

    def refused(place: Path | str, vocabulary: Vocabulary | None = None, **changes: object) -> None:
        with pytest.raises(UserError) as error:
            opened(place, tmp_path, vocabulary, **changes).train[[0]]
        said.append(str(error.value))

    refused(tmp_path)  # no data set
    refused(folder, Characters("abc"))
    refused(folder, **tokenizer)
    change(folder, tokenizer=Numbers(7).to_json())
    refused(folder)
    refused(remote)
    change(folder, shards=[])
    refused(folder)
    told(said, tmp_path, remote)
