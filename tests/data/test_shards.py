"""mingpt.data.shards: the same tokens however they are cut and wherever they lie, and damage that is told in a line."""

import hashlib
import json
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import fsspec
import numpy as np
import pytest
import torch
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import bpe_kit
from mingpt.compute.batches import BatchPlan, RankSampler
from mingpt.data import shardcache
from mingpt.data.dataset import DataSet, Scan, Shard, to_bytes
from mingpt.data.kinds.shards import ShardsData
from mingpt.data.loader import load
from mingpt.data.shards import ShardedTokens, open_shards
from mingpt.data.source import Source
from mingpt.data.vocabulary import Characters, Numbers
from mingpt.data.windows import WindowDataset
from mingpt.errors import UserError
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
    assert targets[:89] == VALIDATION[1:].tolist()
    assert set(targets[89:]) == {-100}
    assert source.vocabulary == VOCABULARY


def test_local_shards_are_mapped_where_they_are_and_travel_as_a_path(tmp_path: Path) -> None:
    source = config(write(tmp_path / "set"), tmp_path).open(16, 2)
    assert isinstance(source.train, WindowDataset)
    assert isinstance(source.train.tokens, ShardedTokens)
    expected = samples(source)
    assert all(isinstance(m, np.memmap) for m in source.train.tokens._mapped.values())
    pickled = pickle.dumps(source.train)
    assert len(pickled) < 3000
    assert pickle.loads(pickled)[[7]][0][0].tolist() == expected[7]
    assert not (tmp_path / "cache" / "shards").exists()


def test_the_identity_is_that_of_the_content(tmp_path: Path) -> None:
    def identity(path: Path) -> str:
        return config(path, tmp_path).open(16, 2).sha256

    first = identity(write(tmp_path / "a"))
    assert identity(write(tmp_path / "b")) == first  # in another place
    assert identity(write(tmp_path / "c", vocabulary=Numbers(272))) != first


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
    with pytest.raises(
        UserError,
        match=r"has token 269, but the vocabulary only 3: set data.tokenizer to the one that made these files$",
    ):
        config(folder, tmp_path).open(16, 2, Characters("abc"))
    (folder / "val.bin").write_bytes(b"abc")
    assert "val.bin has 3 bytes, which are no 16-bit tokens" in problem(folder, tmp_path)


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
    source = config(f"{remote}/set", tmp_path, cache_bytes=limit, stride=7).open(16, 2)
    order = np.random.default_rng(3).permutation(len(source.train))
    for i in order[:60].tolist():
        assert source.train[[i]][0][0].tolist() == TRAIN[7 * i : 7 * i + 16].tolist()
        assert cached(tmp_path) <= limit
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


CURE = "copy it again, or make the data set again"
DAMAGES = {
    "flipped": f"train-00001.bin does not have the checksum of the manifest: {CURE}",
    "truncated": f"train-00001.bin has 598 bytes in place of 600: {CURE}",
    "missing": "there is no such file or bucket: check the spelling",
}


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_damaged_remote_shard_is_a_mistake_and_not_kept(tmp_path: Path, remote: str, kind: str, workers: int) -> None:
    damage(write(tmp_path / "remote" / "set"), kind)
    source = config(f"{remote}/set", tmp_path, stride=100).open(16, 2)
    work = RankSampler(BatchPlan(len(source.train), 1, 8, 8), range(1), 0, 3)
    with pytest.raises(UserError) as error:
        list(load(source.train, work, workers, 600, torch.device("cpu")))
    assert str(error.value).startswith(f"data.path={remote}/set")
    assert str(error.value).endswith(DAMAGES[kind])
    names = {p.stem for p in (tmp_path / "cache" / "shards").glob("*.bin")}
    assert names <= {hashlib.sha256(TRAIN[i : i + 300].tobytes()).hexdigest() for i in (0, 600, 900)}


@pytest.mark.parametrize("content", [b"", b"[[1]]", b"{"])
def test_a_damaged_note_of_a_local_data_set_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    expected = samples(config(write(tmp_path / "set"), tmp_path).open(16, 2))
    (note,) = (tmp_path / "cache").glob("shards-*.json")
    whole = note.read_bytes()
    note.write_bytes(content)
    assert samples(config(tmp_path / "set", tmp_path).open(16, 2)) == expected
    assert f"{note.name} is damaged: both are made again" in capsys.readouterr().out
    assert note.read_bytes() == whole


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_local_shard_is_a_mistake_before_anything_starts(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "set")
    config(folder, tmp_path).open(16, 2)  # it was good once, and is read again only if it changes
    message = problem(damage(folder, kind), tmp_path)
    known = DAMAGES | {"missing": f"train-00001.bin is missing: {CURE}"}
    assert message == f"data.path={folder}: {known[kind]}"


def only_cached(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache" / "shards").glob("*.bin")
    return file


@pytest.mark.parametrize("content", [b"", bytes(598), bytes(600)], ids=["empty", "short", "zeros"])
def test_a_cached_file_that_is_not_its_shard_is_fetched_again(
    tmp_path: Path, remote: str, capfd: pytest.CaptureFixture[str], content: bytes
) -> None:
    """As after a power cut: the name is there, and the content never reached the disk."""
    settings = config(f"{remote}/set", tmp_path, stride=100)
    write(tmp_path / "remote" / "set")
    assert settings.open(16, 2).train[[0]][0].tolist() == [TRAIN[:16].tolist()]
    cached_file = only_cached(tmp_path)
    cached_file.write_bytes(content)
    capfd.readouterr()
    source = settings.open(16, 2)
    assert source.train[[0]][0].tolist() == [TRAIN[:16].tolist()]
    told = capfd.readouterr().out
    assert told.count("\n") == 1
    assert f"data.cache_dir={tmp_path}/cache/shards: {cached_file.name} is damaged (" in told
    assert told.endswith("): it is fetched again\n")
    assert hashlib.sha256(cached_file.read_bytes()).hexdigest() == cached_file.stem


def test_a_cached_shard_is_hashed_once_a_process_and_its_size_looked_at_each_time(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = list[str]()
    real = shardcache.scan

    def watched(file: IO[bytes], dtype: str) -> Scan:
        hashed.append(file.name)
        return real(file, dtype)

    write(tmp_path / "remote" / "set")
    settings = config(f"{remote}/set", tmp_path, stride=100)
    settings.open(16, 2).train[[0]]
    monkeypatch.setattr(shardcache, "scan", watched)
    source = settings.open(16, 2)
    assert isinstance(source.train, WindowDataset)
    assert isinstance(source.train.tokens, ShardedTokens)
    for _ in range(3):
        source.train.tokens._mapped.clear()
        source.train[[0]]
    assert hashed == [str(only_cached(tmp_path))]
    os.truncate(only_cached(tmp_path), 0)
    source.train.tokens._mapped.clear()
    assert source.train[[0]][0].tolist() == [TRAIN[:16].tolist()]


def test_a_fetched_shard_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()
    fsync, replace = os.fsync, os.replace

    def watched_fsync(fd: int) -> None:
        seen.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name.partition('.')[2] or 'folder'}")
        fsync(fd)

    def watched_replace(source: Path, target: Path) -> None:
        if target.parent.name == "shards":
            seen.append("replace")
        replace(source, target)

    write(tmp_path / "remote" / "set")
    source = config(f"{remote}/set", tmp_path).open(16, 2)
    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    source.train[[0]]
    assert seen == ["fsync 600.part", "replace", "fsync folder"]


@pytest.mark.parametrize("again", [False, True], ids=["fetched", "cached"])
def test_a_token_beyond_the_vocabulary_is_a_mistake_in_a_remote_shard_too(
    tmp_path: Path, remote: str, again: bool
) -> None:
    folder, largest = write(tmp_path / "remote" / "set"), int(max(TRAIN[:300]))
    settings = config(f"{remote}/set", tmp_path, stride=100)
    if again:  # a data set of a larger vocabulary has left it in the cache
        settings.open(16, 2).train[[0]]
    small = write(tmp_path / "small", vocabulary=Numbers(largest))
    (folder / "manifest.json").write_bytes((small / "manifest.json").read_bytes())
    with pytest.raises(UserError) as error:
        settings.open(16, 2).train[[0]]
    assert str(error.value) == (
        f"data.path={remote}/set: train-00000.bin has token {largest}, but the vocabulary only {largest}: {CURE}"
    )


def test_a_server_that_sends_more_than_a_shard_is_not_read_to_its_end(tmp_path: Path, remote: str) -> None:
    folder = write(tmp_path / "remote" / "set")
    with open(folder / "train-00000.bin", "ab") as f:
        f.truncate(1 << 30)
    source = config(f"{remote}/set", tmp_path).open(16, 2)
    with pytest.raises(UserError, match=r"train-00000\.bin has more than 600 bytes"):
        source.train[[0]]
    assert cached(tmp_path) == 0


def test_a_shard_larger_than_the_cache_is_a_mistake(tmp_path: Path, remote: str) -> None:
    write(tmp_path / "remote" / "set")
    source = config(f"{remote}/set", tmp_path, cache_bytes=599).open(16, 2)
    with pytest.raises(
        UserError, match=r"^data\.cache_bytes=599 is less than a shard .* takes: raise it to 600 or more"
    ):
        source.train[[0]]


def read_all(settings: ShardsData, seed: int) -> int:
    """In a process of its own: every sample, in an order of its own."""
    source = settings.open(16, 2)
    for i in np.random.default_rng(seed).permutation(len(source.train)).tolist():
        assert source.train[[i]][0][0].tolist() == TRAIN[7 * i : 7 * i + 16].tolist()
        with FileLock(Path(settings.cache_dir) / "shards" / "room.lock"):
            assert cached(Path(settings.cache_dir).parent) <= settings.cache_bytes
    return len(source.train)


@pytest.mark.slow
def test_processes_share_a_cache_that_is_too_small_for_them(tmp_path: Path, remote: str) -> None:
    write(tmp_path / "remote" / "set", (100,) * 10)
    (tmp_path / "cache" / "shards").mkdir(parents=True)
    (tmp_path / "cache" / "shards" / f"{'0' * 64}.900.part").write_bytes(b"of a killed process")
    settings = config(f"{remote}/set", tmp_path, cache_bytes=650, stride=7)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert pool.starmap(read_all, [(settings, seed) for seed in range(3)]) == [141] * 3
    assert not list((tmp_path / "cache" / "shards").glob("*.part"))


# --- mistakes ---


def test_a_place_without_a_data_set_is_a_mistake(tmp_path: Path) -> None:
    assert problem(tmp_path, tmp_path) == (
        f"data.path={tmp_path}: no data set is there (no manifest.json): give the folder that `mingpt prepare` has "
        "written, or one with nanoGPT's train.bin and val.bin"
    )
    assert "no data set is there" in problem(tmp_path / "none", tmp_path)
    (tmp_path / "book.txt").write_text("a book")
    assert "no data set is there" in problem(tmp_path / "book.txt", tmp_path)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda m: m["shards"][0].update(name="../train-00000.bin"), "shards.0.name"),
        (lambda m: m["shards"][0].update(name="/etc/passwd"), "shards.0.name"),
        (lambda m: m["shards"][0].update(tokens=-1), "shards.0.tokens"),
        (lambda m: m.update(format="mingpt-shards-2"), "format"),
        (lambda m: m.update(dtype="object"), "dtype"),
        (lambda m: m.pop("shards"), "shards"),
        (lambda m: m.update({"\x1b[2J\nerror": 1}), r"\x1b[2J\nerror"),
    ],
)
def test_a_strangers_manifest_leads_nowhere(
    tmp_path: Path, change: Callable[[dict[str, object]], None], where: str
) -> None:
    folder = write(tmp_path / "set")
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    (folder / "manifest.json").write_text(json.dumps(content))
    message = problem(folder, tmp_path)
    assert message.startswith(f"data.path={folder}: manifest.json is not that of a prepared data set ({where}: ")
    (folder / "manifest.json").write_text("{")
    assert "manifest.json is not that of a prepared data set (the file: Invalid JSON" in problem(folder, tmp_path)


def test_a_vocabulary_that_does_not_match_is_a_mistake(tmp_path: Path) -> None:
    folder = write(tmp_path / "set")
    with pytest.raises(UserError, match=r"its vocabulary is not the snapshot's: prepare the text with that one$"):
        config(folder, tmp_path).open(16, 2, Characters("abc"))
    other = bpe_kit.write_tokenizer(tmp_path / "hf")
    assert "its vocabulary is not that of data.tokenizer: leave data.tokenizer out" in problem(
        folder, tmp_path, tokenizer=str(other)
    )
    small = write(tmp_path / "small", vocabulary=Numbers(100))
    assert "train-00000.bin has token 269, but the vocabulary only 100" in problem(small, tmp_path)


def test_a_data_set_too_short_for_a_block_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^model\.block_size=1000 is longer than the data: .* has 1000 training tokens"
    ):
        config(write(tmp_path / "set"), tmp_path).open(1000, 2)
