"""`mingpt prepare --tokens N`: the whole documents up to the one that makes it N, whatever kills and processes."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import bpe_kit
from mingpt.data import bpe
from mingpt.data.dataset import DataSet, tokens_in
from mingpt.errors import UserError
from mingpt.prepare import documents
from mingpt.prepare.documents import Options, is_validation
from mingpt.prepare.prepare import main, prepare, token_count
from mingpt.prepare.shardwriter import ShardWriter
from prepare_kit import Killed, files, some_texts, write_jsonl

VOCABULARY = bpe_kit.small()
FRACTION = 0.2


def prepared(sources: Sequence[Path], out: Path, most: int, **options: int) -> DataSet:
    known = Options(separator="=-=", val_fraction=FRACTION)
    return prepare([str(s) for s in sources], str(out), VOCABULARY, known, most=most, **options)  # type: ignore[arg-type]


def up_to(texts: Sequence[str], most: int) -> list[str]:
    """The documents that belong there, counted as anybody would."""
    chosen, count = list[str](), 0
    for text in texts:
        if count >= most:
            break
        chosen.append(text)
        count += len(VOCABULARY.encode(text)) + 1
    return chosen


def expected(texts: Sequence[str], validation: bool) -> bytes:
    chosen = [t for t in texts if is_validation(next(iter(bpe.pieces(t))), FRACTION) == validation]
    return b"".join(i.to_bytes(2, "little") for t in chosen for i in (*VOCABULARY.encode(t), VOCABULARY.end_of_text))


def row(out: Path, dataset: DataSet, split: str) -> bytes:
    return b"".join((out / s.name).read_bytes() for s in dataset.shards if s.split == split)


@pytest.mark.parametrize("form", ["jsonl", "txt"])
@pytest.mark.parametrize("read", [60, 1 << 20])  # a document or so in a block; all of a file
def test_it_ends_with_the_document_that_makes_it_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, read: int
) -> None:
    monkeypatch.setattr(documents, "READ", read)
    monkeypatch.setattr(bpe, "PIECE", 64)  # and documents of several pieces
    texts = some_texts(40)
    sources = [tmp_path / f"{i}.{form}" for i in range(2)]
    for source, part in zip(sources, (texts[:25], texts[25:]), strict=True):
        write_jsonl(source, part) if form == "jsonl" else source.write_text("=-=".join(part))
    sizes = [len(VOCABULARY.encode(text)) + 1 for text in texts]
    for most in (1, sizes[0], sizes[0] + 1, sum(sizes[:25]), sum(sizes[:25]) + 1, sum(sizes) - 1):
        dataset = prepared(sources, out := tmp_path / str(most), most, shard_tokens=37)
        chosen = up_to(texts, most)
        assert row(out, dataset, "train") == expected(chosen, False)
        assert row(out, dataset, "validation") == expected(chosen, True)
        assert sum(shard.documents for shard in dataset.shards) == len(chosen)
        assert tokens_in(dataset.shards) >= most > tokens_in(dataset.shards) - sizes[len(chosen) - 1]


def test_files_beyond_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [write_jsonl(tmp_path / f"{i}.jsonl", some_texts(20, seed=i)) for i in range(2)]
    (tmp_path / "2.jsonl").write_text("no JSON")
    dataset = prepared([*sources, tmp_path / "2.jsonl"], tmp_path / "out", 2000)
    count = f"{tokens_in(dataset.shards):,} tokens, {sum(s.documents for s in dataset.shards)} documents"
    assert capsys.readouterr().out == f"prepare: stopped at {count} (--tokens 2,000), in file 2 of 3\n"


def test_fewer_than_were_asked_for_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(20))
    dataset = prepared([source], tmp_path / "out", 1_000_000)
    assert dataset.shards == prepared([source], tmp_path / "all", 0).shards
    told = f"note: the sources hold only {tokens_in(dataset.shards):,} tokens, 20 documents, fewer than --tokens"
    assert told in capsys.readouterr().out


def test_a_kill_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingpt.prepare.prepare.RECORD_SECONDS", 0)
    sources = [write_jsonl(tmp_path / f"{i}.jsonl", some_texts(30, seed=i)) for i in range(6)]
    undisturbed = prepared(sources, tmp_path / "undisturbed", 10_000, shard_tokens=100)
    add, close = ShardWriter.add, ShardWriter.close
    for left in (5, 3):

        def dying(self: ShardWriter, *given: object) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            add(self, *given)  # type: ignore[arg-type]

        monkeypatch.setattr(ShardWriter, "add", dying)
        with pytest.raises(Killed):
            prepared(sources, tmp_path / "out", 10_000, shard_tokens=100)
    monkeypatch.setattr(ShardWriter, "add", add)

    def after_closing(self: ShardWriter) -> None:  # all is written but the manifest
        close(self)
        raise Killed

    monkeypatch.setattr(ShardWriter, "close", after_closing)
    with pytest.raises(Killed):
        prepared(sources, tmp_path / "out", 10_000, shard_tokens=100)
    monkeypatch.setattr(ShardWriter, "close", close)
    assert prepared(sources, tmp_path / "out", 10_000, shard_tokens=100) == undisturbed
    assert files(tmp_path / "out") == files(tmp_path / "undisturbed")


def test_a_finished_one_is_known_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(documents, "READ", 200)  # it ends in the middle of a file
    sources = [write_jsonl(tmp_path / f"{i}.jsonl", some_texts(20, seed=i)) for i in range(3)]
    first = prepared(sources, tmp_path / "out", 2000)
    for source in sources:
        os.utime(source, (1, 1))  # of another time, so that it is read again
    capsys.readouterr()
    assert prepared(sources, tmp_path / "out", 2000) == first
    assert "reading the sources" in capsys.readouterr().out
    for other in (2001, 0):
        with pytest.raises(UserError, match="another data set is there"):
            prepared(sources, tmp_path / "out", other)
    content = sources[1].read_bytes()
    sources[1].write_bytes(content.replace(b"the", b"tha", 1))
    with pytest.raises(UserError, match="another data set is there"):
        prepared(sources, tmp_path / "out", 2000)


@pytest.mark.slow
def test_the_number_of_processes_changes_no_byte(tmp_path: Path) -> None:
    for i in range(4):
        write_jsonl(tmp_path / f"{i}.jsonl", some_texts(300, seed=i))
    tokenizer = str(bpe_kit.write_gpt2(tmp_path / "gpt2"))
    for processes in ("1", "3"):
        command = [f"{tmp_path}/*.jsonl", "--out", f"{tmp_path}/{processes}", "--processes", processes]
        command += ["--tokenizer", tokenizer, "--shard-tokens", "1000", "--tokens", "12_345"]
        subprocess.run([sys.executable, "-m", "mingpt.data.prepare", *command], check=True, timeout=600)
    assert files(tmp_path / "1") == files(tmp_path / "3")


def test_numbers_are_written_as_people_write_them() -> None:
    assert [token_count(text) for text in ("10B", "500M", "1.5k", "1_000_000", "7")] == [
        10_000_000_000,
        500_000_000,
        1500,
        1_000_000,
        7,
    ]


@pytest.mark.parametrize("number", ["10G", "-1", "0", "0.1", "B", "1e9"])
def test_no_number_is_a_mistake(capsys: pytest.CaptureFixture[str], number: str) -> None:
    assert main(["x", "--out", "y", "--tokenizer", "z", f"--tokens={number}"]) == 64
    expected = f"error: --tokens {number}: give a number above 0, as in 10B, 500M or 1_000_000\n"
    assert capsys.readouterr().err == expected
