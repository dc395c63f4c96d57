"""`mingpt prepare --tokens N`: the whole documents up to the one that makes it N."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from mingpt.data import bpe
from mingpt.data.dataset import tokens_in
from mingpt.errors import UserError
from mingpt.prepare import documents
from mingpt.prepare.prepare import token_count
from prepare_kit import VOCABULARY, expected, prepared, row, some_texts, write_jsonl
from told import Told


def up_to(texts: Sequence[str], most: int) -> list[str]:
    """The documents that belong there, counted as anybody would."""
    chosen, count = list[str](), 0
    for text in texts:
        if count >= most:
            break
        chosen.append(text)
        count += len(VOCABULARY.encode(text)) + 1
    return chosen


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
        out = tmp_path / str(most)
        dataset = prepared(sources, out, separator="=-=", val_fraction=0.2, most=most, shard_tokens=37)
        chosen = up_to(texts, most)
        for split in ("train", "validation"):
            assert row(out, dataset, split) == expected(chosen, 0.2, split)
        assert sum(shard.documents for shard in dataset.shards) == len(chosen)
        assert tokens_in(dataset.shards) >= most > tokens_in(dataset.shards) - sizes[len(chosen) - 1]


def test_files_beyond_are_not_read_and_fewer_than_asked_for_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], told: Told
) -> None:
    sources = [write_jsonl(tmp_path / f"{i}.jsonl", some_texts(20, seed=i)) for i in range(2)]
    (tmp_path / "2.jsonl").write_text("no JSON")
    prepared([*sources, tmp_path / "2.jsonl"], tmp_path / "out", most=2000)
    prepared(sources, tmp_path / "all", most=1_000_000)
    told(capsys.readouterr().out)


def test_a_finished_one_is_known_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "READ", 200)  # it ends in the middle of a file
    sources = [write_jsonl(tmp_path / f"{i}.jsonl", some_texts(20, seed=i)) for i in range(3)]
    first = prepared(sources, tmp_path / "out", most=2000)
    for source in sources:
        os.utime(source, (1, 1))  # of another time, so that it is read again
    assert prepared(sources, tmp_path / "out", most=2000) == first
    sources[1].write_bytes(sources[1].read_bytes().replace(b"the", b"tha", 1))
    for most in (2001, 0, 2000):
        with pytest.raises(UserError, match=r"^--out="):
            prepared(sources, tmp_path / "out", most=most)


def test_numbers_are_written_as_people_write_them() -> None:
    written = {"10B": 10_000_000_000, "500M": 500_000_000, "1.5k": 1500, "1_000_000": 1_000_000, "7": 7}
    assert {text: token_count(text) for text in written} == written
