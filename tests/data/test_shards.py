"""mingpt.data.shards: the same tokens however they are cut and wherever they lie, and damage that is told in a line."""

import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import bpe_kit
from mingpt.compute.batches import BatchPlan, RankSampler
from mingpt.data import shardcache
from mingpt.data.dataset import DataSet, Shard, to_bytes
from mingpt.data.loader import load
from mingpt.data.shards import ShardedTokens, ShardsData, open_shards
from mingpt.data.source import Source
from mingpt.data.vocabulary import Characters, Numbers
from mingpt.errors import UserError
from told import Told
from web_kit import served

VOCABULARY = bpe_kit.small()
TRAIN = np.random.default_rng(1).integers(0, 270, 1000).astype("<u2")
VALIDATION = np.random.default_rng(2).integers(0, 270, 90).astype("<u2")


def write(folder: Path, sizes: Sequence[int] = (300, 300, 300, 100), vocabulary: object = VOCABULARY) -> Path:
    """A data set of TRAIN, in shards of these sizes, and of VALIDATION."""
    folder.mkdir(parents=True)
    shards, start = [], 0
    for i, size in enumerate(sizes):
        shards.append(shard(folder, f"train-{i:05d}.bin", TRAIN[start : start + size]))
        start += size
    assert start == len(TRAIN)
    shards.append(shard(folder, "validation-00000.bin", VALIDATION))
    rewrite(folder, shards, vocabulary)
    return folder


def shard(folder: Path, name: str, tokens: NDArray[np.uint16]) -> Shard:
    (folder / name).write_bytes(tokens.tobytes())
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()
    split = name.partition("-")[0]
    return Shard(name=name, split=split, tokens=len(tokens), documents=0, sha256=digest)  # type: ignore[arg-type]


def rewrite(folder: Path, shards: Sequence[Shard], vocabulary: object = VOCABULARY) -> None:
    tokenizer = vocabulary.to_json()  # type: ignore[attr-defined]
    dataset = DataSet(dtype="uint16", tokenizer=tokenizer, made_from="0" * 64, shards=tuple(shards))
    (folder / "manifest.json").write_bytes(to_bytes(dataset))


def config(path: Path | str, tmp_path: Path, **changes: object) -> ShardsData:
    return ShardsData.model_validate({"path": str(path), "cache_dir": str(tmp_path / "cache")} | changes)


def problem(path: Path | str, tmp_path: Path, **changes: object) -> str:
    with pytest.raises(UserError) as error:
        open_shards(config(path, tmp_path, **changes), 8, 2)
    return str(error.value)


def samples(source: Source) -> list[list[int]]:
    return [source.train[[i]][0][0].tolist() for i in range(len(source.train))]


# --- the tokens ---


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), max_size=12), st.integers(0, 300), st.integers(0, 300))
def test_any_part_of_a_row_is_read_across_its_shards(sizes: list[int], a: int, b: int) -> None:
    whole = np.arange(sum(sizes), dtype=np.uint16)
    row = ShardedTokens([Shard.model_construct(name="x", tokens=n) for n in sizes], "uint16", Path("nowhere"))
    row._mapped = dict(enumerate(np.split(whole, np.cumsum(sizes)[:-1]) if sizes else []))
    start, stop = sorted((min(a, len(whole)), min(b, len(whole))))
    assert len(row) == len(whole)
    assert row.read(start, stop).tolist() == whole[start:stop].tolist()


@pytest.mark.parametrize("sizes", [(1000,), (300, 300, 300, 100), (1,) * 1000])
def test_the_samples_are_the_same_however_the_shards_are_cut(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    source = config(write(tmp_path / "set", sizes), tmp_path, stride=3).open(16, 2)
    assert samples(source) == [TRAIN[i : i + 16].tolist() for i in range(0, 1000 - 16, 3)]
    targets = [t for i in range(len(source.validation)) for t in source.validation[i][1].flatten().tolist()]
    assert targets == [*VALIDATION[1:].tolist(), *[-100] * (len(targets) - 89)]
    assert source.vocabulary == VOCABULARY
    other = write(tmp_path / "other", sizes, Numbers(272))
    assert source.sha256 == config(write(tmp_path / "copy", sizes), tmp_path).open(16, 2).sha256
    assert source.sha256 != config(other, tmp_path).open(16, 2).sha256
    assert len(pickle.dumps(source.train)) < 3000 + 200 * len(sizes)  # local shards travel as a path
    assert not (tmp_path / "cache" / "shards").exists()


# --- nanoGPT's files ---


def nanogpt(folder: Path) -> Path:
    folder.mkdir()
    (folder / "train.bin").write_bytes(TRAIN.tobytes())
    (folder / "val.bin").write_bytes(VALIDATION.tobytes())
    return folder


def test_nanogpts_files_are_read_as_they_are(tmp_path: Path) -> None:
    folder = nanogpt(tmp_path / "nano")
    source = config(folder, tmp_path).open(16, 2)
    assert samples(source) == [TRAIN[i : i + 16].tolist() for i in range(1000 - 16)]
    assert source.vocabulary == Numbers(int(max(TRAIN.max(), VALIDATION.max())) + 1)
    tokenizer = bpe_kit.write_gpt2(tmp_path / "gpt2")
    assert config(folder, tmp_path, tokenizer=str(tokenizer)).open(16, 2).vocabulary == VOCABULARY
    with pytest.raises(UserError, match=r"token 269.*set data\.tokenizer"):
        config(folder, tmp_path).open(16, 2, Characters("abc"))
    (folder / "val.bin").write_bytes(b"abc")
    assert "val.bin has 3 bytes" in problem(folder, tmp_path)


# --- from an object store ---


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    """The URL of the folder tmp_path/remote on a web server."""
    (tmp_path / "remote").mkdir()
    with served(tmp_path / "remote") as url:
        yield url


def cached(tmp_path: Path) -> int:
    """The bytes of the shards in the cache."""
    folder, used = tmp_path / "cache" / "shards", 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # a download that failed
            used += path.stat().st_size if path.suffix in (".bin", ".part") else 0
    return used


@pytest.mark.parametrize("limit", [10_000, 1300, 600])
def test_shards_are_fetched_into_a_bounded_folder(tmp_path: Path, remote: str, limit: int) -> None:
    write(tmp_path / "remote" / "set")
    killed = tmp_path / "cache" / "shards" / f"{'0' * 64}.900.part"  # of a process that is gone
    killed.parent.mkdir(parents=True)
    killed.touch()
    source = config(f"{remote}/set", tmp_path, cache_bytes=limit, stride=7).open(16, 2)
    order = np.random.default_rng(3).permutation(len(source.train))
    for i in order[:60].tolist():
        assert source.train[[i]][0][0].tolist() == TRAIN[7 * i : 7 * i + 16].tolist()
        assert cached(tmp_path) <= limit
    assert not killed.exists()
    if limit == 10_000:  # all of it is there: the store is needed no more
        fsspec.filesystem("http").invalidate_cache()
        (tmp_path / "remote" / "set").rename(tmp_path / "gone")
        assert len(samples(source)) == len(source.train)
        assert len(list((tmp_path / "cache" / "shards").glob("*.bin"))) == 4


def test_the_least_recently_used_goes_first(tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingpt.data.shardcache.TOUCH_SECONDS", 0)
    write(tmp_path / "remote" / "set")
    source = config(f"{remote}/set", tmp_path, cache_bytes=1400, stride=100).open(16, 2)
    names = [hashlib.sha256(TRAIN[i : i + 300].tobytes()).hexdigest() for i in (0, 300, 600, 900)]
    for sample in (0, 3, 0, 6):  # of shards 0, 1, 0, 2: two have room
        assert source.train[[sample]][0].shape == (1, 16)
    there = {p.stem for p in (tmp_path / "cache" / "shards").glob("*.bin")}
    assert there == {names[0], names[2]}


def damage(folder: Path, kind: str) -> Path:
    victim = folder / "train-00001.bin"
    content = bytearray(victim.read_bytes())
    if kind == "flipped":
        content[77] ^= 1
    victim.write_bytes(content[:-2] if kind == "truncated" else content)
    if kind == "missing":
        victim.unlink()
    return folder


@pytest.mark.parametrize("kind", ["flipped", "truncated", "missing"])
def test_a_damaged_shard_is_a_mistake_and_not_kept(tmp_path: Path, remote: str, kind: str, told: Told) -> None:
    folder = write(tmp_path / "remote" / "set")
    config(folder, tmp_path).open(16, 2)  # it was good once, and is read again only if it changes
    source = config(f"{remote}/set", tmp_path, stride=100).open(16, 2)
    damage(folder, kind)
    told(problem(folder, tmp_path), tmp_path)
    work = RankSampler(BatchPlan(len(source.train), 1, 8, 8), range(1), 0, 3)
    with pytest.raises(UserError) as error:
        list(load(source.train, work, 0, 600, torch.device("cpu")))
    told(str(error.value), remote)
    names = {p.stem for p in (tmp_path / "cache" / "shards").glob("*.bin")}
    assert names <= {hashlib.sha256(TRAIN[i : i + 300].tobytes()).hexdigest() for i in (0, 600, 900)}


@pytest.mark.parametrize("content", [b"", bytes(600)], ids=["empty", "zeros"])
def test_a_cached_file_that_is_not_its_shard_is_fetched_again(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """As after a power cut. It is hashed once a process; on the disk before it has its name."""
    settings = config(f"{remote}/set", tmp_path, stride=100)
    write(tmp_path / "remote" / "set")
    seen = list[str]()
    monkeypatch.setattr(shardcache, "scan", noted(seen, "scan", shardcache.scan))
    monkeypatch.setattr(os, "fsync", noted(seen, "fsync", os.fsync))
    monkeypatch.setattr(os, "replace", noted(seen, "replace", os.replace))
    settings.open(16, 2).train[[0]]
    (file,) = (tmp_path / "cache" / "shards").glob("*.bin")
    assert seen[-3:] == ["fsync", "replace", "fsync"]
    for damaged in (True, False):
        seen.clear()
        if damaged:
            file.write_bytes(content)
        windows: Any = settings.open(16, 2).train
        for _ in range(3):
            assert windows[[0]][0].tolist() == [TRAIN[:16].tolist()]
            windows.tokens._mapped.clear()
        assert ("replace" in seen) == damaged
        assert damaged or seen == ["scan"]
    assert hashlib.sha256(file.read_bytes()).hexdigest() == file.stem


def noted(seen: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        seen.append(name)
        return function(*arguments, **options)

    return call


def test_a_server_that_sends_more_than_a_shard_is_not_read_to_its_end(tmp_path: Path, remote: str) -> None:
    folder = write(tmp_path / "remote" / "set")
    with open(folder / "train-00000.bin", "ab") as f:
        f.truncate(1 << 30)
    source = config(f"{remote}/set", tmp_path).open(16, 2)
    with pytest.raises(UserError, match=r"train-00000\.bin has more than 600 bytes"):
        source.train[[0]]
    assert cached(tmp_path) == 0
    with pytest.raises(UserError, match=r"^data\.cache_bytes=599 "):
        config(f"{remote}/set", tmp_path, cache_bytes=599).open(16, 2).train[[0]]


# --- mistakes ---


@pytest.mark.parametrize(
    "change",
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
def test_a_strangers_manifest_leads_nowhere(tmp_path: Path, change: dict[str, Any], told: Told) -> None:
    folder = write(tmp_path / "set")
    content = json.loads((folder / "manifest.json").read_text())
    (content["shards"][0] if {"name", "tokens"} & change.keys() else content).update(change)
    (folder / "manifest.json").write_text(json.dumps(content))
    told(problem(folder, tmp_path), tmp_path)


def test_what_does_not_match_is_a_mistake(tmp_path: Path, remote: str, told: Told) -> None:
    told(problem(tmp_path, tmp_path), tmp_path)  # no data set
    folder = write(tmp_path / "remote" / "set")
    with pytest.raises(UserError) as other:
        config(folder, tmp_path).open(16, 2, Characters("abc"))
    told(str(other.value), tmp_path)
    told(problem(folder, tmp_path, tokenizer=str(bpe_kit.write_tokenizer(tmp_path / "hf"))), tmp_path)
    with pytest.raises(UserError, match=r"^model\.block_size=1000 "):
        config(folder, tmp_path).open(1000, 2)
    settings = config(f"{remote}/set", tmp_path, stride=100)
    settings.open(16, 2).train[[0]]  # a data set of a larger vocabulary leaves it in the cache
    small = write(tmp_path / "small", vocabulary=Numbers(int(max(TRAIN[:300]))))
    told(problem(small, tmp_path), tmp_path)
    (folder / "manifest.json").write_bytes((small / "manifest.json").read_bytes())
    with pytest.raises(UserError) as far:
        settings.open(16, 2).train[[0]]
    told(str(far.value), remote)
