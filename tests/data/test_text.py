"""mingpt.data.text: exact tokens, disjoint splits, one cache entry a node, and errors that name the key."""

import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from mingpt.config.datasets import TextData
from mingpt.data import bpe
from mingpt.data import text as text_module
from mingpt.data.cache import node_lock
from mingpt.data.source import Source, Vocabulary
from mingpt.data.text import open_text, smallest_type
from mingpt.data.vocabulary import Bytes, Characters
from mingpt.errors import TransientError, UserError
from tests.kits import bpe_kit
from tests.kits.told import Told

SENTENCE = "der Bär, größer – 漢字 🙂\n"
MANY = "".join(map(chr, range(0x4E00, 0x4F00)))  # with those of a sentence, more characters than a byte can number


def opened(
    folder: Path, content: bytes | str | None = None, vocabulary: Vocabulary | None = None, **changes: object
) -> Source:
    """This text, or the one that is there."""
    if content is not None:
        (folder / "source.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    data = {"path": f"{folder}/source.txt", "cache_dir": f"{folder}/cache", "val_fraction": 0.0} | changes
    return open_text(TextData.model_validate(data), 1, 1, vocabulary)


def tokens(text: Source) -> list[int]:
    """All of them, as they lie in the cache."""
    return [*cast(Any, text.train).tokens.mapped]


def cached(tmp_path: Path) -> list[str]:
    """The cache's files. filelock leaves its lock files on some systems and not on others."""
    return sorted(p.name for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock")


# --- tokens ---


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
@pytest.mark.parametrize("block", [1, 3, 1 << 22])
def test_tokens_are_those_of_the_whole_text_however_small_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, block: int
) -> None:
    """Characters of up to four bytes lie across the blocks; pieces of bpe end where those of the whole text do."""
    monkeypatch.setattr(text_module, "BLOCK", block)
    monkeypatch.setattr(bpe, "PIECE", 16)
    content = "\ufeffa\r\nb\x00" + f"{SENTENCE}the king woe\n" * 5 + MANY
    tokenizer = str(bpe_kit.write_gpt2(tmp_path / "gpt2")) if kind == "bpe" else None
    text = opened(tmp_path, content, tokens=kind, tokenizer=tokenizer, val_fraction=0.25)
    characters = "".join(sorted(set(content)))
    vocabulary, expected, dtype = {
        "char": (Characters(characters), [characters.index(c) for c in content], "u2"),
        "byte": (Bytes(), list(content.encode()), "u1"),
        "bpe": (bpe_kit.small(), bpe_kit.small().encode(content), "u2"),
    }[kind]
    assert (text.vocabulary, tokens(text)) == (vocabulary, expected)
    assert cast(Any, text.train).tokens.mapped.dtype == dtype
    assert text.sha256 == sha256(content.encode()).hexdigest()
    border, split = round(len(expected) * 0.75), cast(Any, text.validation)  # no training sample touches its tokens
    assert (len(text.train), split.size) == (border - 1, len(expected) - border - 1)


def test_bytes_are_taken_as_they_are(tmp_path: Path) -> None:
    """Though they are no UTF-8; those of a prompt on a command line, too."""
    content = bytes(range(256)) + b"\xff\xfe"
    assert bytes(tokens(opened(tmp_path, content, tokens="byte"))) == content
    assert Bytes().encode(os.fsdecode(b"a\xff")) == [97, 0xFF]
    assert Bytes().decode([97, 0xC3]) == "a\ufffd"  # a model may well generate half of one
    with pytest.raises(UserError):
        Bytes().encode("\ud800")


def test_tokens_are_stored_in_the_smallest_type_that_holds_them() -> None:
    assert [smallest_type(size) for size in (256, 257, 65536, 65537)] == [np.uint8, np.uint16, np.uint16, np.uint32]


def test_a_snapshots_vocabulary_is_kept(tmp_path: Path) -> None:
    """A model that is fine-tuned or evaluated on another text knows its own characters only."""
    (tmp_path / "source.txt").write_text("bab")
    for own, ids in ((Characters("abc"), [1, 0, 1]), (None, [1, 0, 1]), (Bytes(), [98, 97, 98])):
        source = opened(tmp_path, vocabulary=own)  # each has a cache entry of its own
        assert (source.vocabulary, tokens(source)) == (own or Characters("ab"), ids)
    with pytest.raises(UserError, match=r"^data\.path=.*: the text has characters that the model never saw: 'ab'"):
        opened(tmp_path, vocabulary=Characters("xz"))


def test_a_text_that_changes_while_it_is_read_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, points = tmp_path / "source.txt", text_module._Text.points

    def then_written(text: text_module._Text) -> Iterator[NDArray[np.uint32]]:
        yield from points(text)
        path.write_text("to do or not to do")

    monkeypatch.setattr(text_module._Text, "points", then_written)
    with pytest.raises(TransientError, match=rf"^data\.path={path}: it has changed"):
        opened(tmp_path, "to be or not to be")
    assert cached(tmp_path) == []


# --- the cache ---


def test_a_disk_that_is_full_is_a_mistake_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", full)
        with pytest.raises(UserError, match=f"^data.cache_dir={tmp_path}/cache: "):
            opened(tmp_path, "to be or not")
    assert cached(tmp_path) == []
    assert len(tokens(opened(tmp_path))) == 12


def test_a_second_opening_takes_the_cache_whatever_the_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(tmp_path, "to be or not to be")
    with monkeypatch.context() as unread:
        unread.setattr(text_module, "_encode", pytest.fail)
        second = opened(tmp_path, val_fraction=0.5, stride=3)
    assert (tokens(second), second.vocabulary, second.sha256) == (tokens(first), first.vocabulary, first.sha256)
    assert opened(tmp_path, tokens="byte").vocabulary == Bytes()
    changed = opened(tmp_path, "to do or not to do")  # as long as the first
    assert Characters(" dnort").decode(tokens(changed)) == "to do or not to do"
    assert sorted(Path(name).suffix for name in cached(tmp_path)) == [".json"] * 3 + [".npy"] * 3


def test_a_process_that_goes_on_is_waited_for_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit begins anew whenever the file under way has been touched."""
    lock, part = tmp_path / "a.lock", tmp_path / "a.part"
    part.touch()
    acquire, times = FileLock.acquire, iter(range(1, 9))

    def busy(file: FileLock, timeout: float) -> Any:
        if (now := next(times)) < 8:
            os.utime(part, (now, now))
            raise Timeout(str(lock))
        return acquire(file, timeout)

    monkeypatch.setattr(FileLock, "acquire", busy)
    with node_lock(lock, 1):
        assert next(times, None) is None


@pytest.mark.parametrize("suffix", [".json", ".npy"])
@pytest.mark.parametrize("missing", [True, False])
def test_a_damaged_entry_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, missing: bool
) -> None:
    """As after a power cut: the names are there, and not all of the content."""
    first = tokens(opened(tmp_path, "to be or not to be"))
    [path] = (tmp_path / "cache").glob(f"*{suffix}")
    whole = path.read_bytes()
    path.write_bytes(whole[:-8] + bytes(8))
    if missing:
        path.unlink()
    assert tokens(opened(tmp_path)) == first
    assert (path.name in capsys.readouterr().out) != missing
    assert path.read_bytes() == whole


def test_who_has_waited_for_another_process_takes_what_that_has_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source.txt").write_text("to be or not")
    acquire = FileLock.acquire

    def overtaken(file: FileLock, *arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(FileLock, "acquire", acquire)
        opened(tmp_path)
        monkeypatch.setattr(text_module, "_encode", pytest.fail)
        return acquire(file, *arguments, **options)

    monkeypatch.setattr(FileLock, "acquire", overtaken)
    assert len(tokens(opened(tmp_path))) == 12


def test_a_builder_that_never_ends_is_waited_for_no_longer_than_configured(tmp_path: Path) -> None:
    """What is complete is read without the lock: another user, or one of a read-only disk, can't take it."""
    opened(tmp_path, "abc")
    [entry] = (tmp_path / "cache").glob("*.npy")
    with FileLock(entry.with_suffix(".lock")):
        assert tokens(opened(tmp_path, cache_timeout_seconds=0.05)) == [0, 1, 2]
        entry.unlink()
        with pytest.raises(UserError, match=r"data\.cache_timeout_seconds"):
            opened(tmp_path, cache_timeout_seconds=0.05)


# --- mistakes ---


# faults/bad_input.yaml has what is missing, and a folder.
@pytest.mark.parametrize(
    ("content", "settings"),
    [
        ("", {}),
        ("aaaa", {}),
        ("abc\udcffde", {}),
        ("a\udcc3", {}),
        ("to be or not to be", {"val_fraction": 0.05}),
        ("abcdefghij", {"val_fraction": 0.2}),
        ("abc", {"cache_dir": "source.txt/cache"}),  # below a file
        ("", {"path": "memory://no/such.txt"}),
        ("", {"path": "foo://x"}),
        ("", {"path": "pipe"}),
    ],
    ids=range(10),
)
def test_what_cannot_be_read_is_a_mistake_and_leaves_no_cache_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told, content: str, settings: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("source.txt").write_bytes(os.fsencode(content))
    data = {"path": "source.txt", "cache_dir": "cache", "val_fraction": 0} | settings
    with told.mistake(tmp_path):
        open_text(TextData.model_validate(data), 8)
    assert "val_fraction" in settings or not list(tmp_path.glob("cache/*.npy"))


@pytest.mark.parametrize(
    "name", ["rows.csv", "rows.JSONL", "rows.json", "rows.parquet", "rows.tsv", "text.txt.gz", "a.txt"]
)
def test_a_table_that_is_taken_for_a_text_is_told(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / name).write_text("to be,or not,to be\n" * 9)
    assert len(opened(tmp_path, path=str(path)).train)
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert [all(word in line for word in (name, "`mingpt prepare`", "data=chat")) for line in warnings] == [True] * (
        name != "a.txt"
    )


def test_a_byte_order_mark_in_a_text_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened(tmp_path, "\ufeffto be or not to be")
    assert "byte-order mark" in capsys.readouterr().out
