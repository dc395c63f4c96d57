"""mingpt.data.text: exact tokens, disjoint splits, one cache entry a node, and errors that name the key."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock, Timeout
from numpy.typing import NDArray

import bpe_kit
from mingpt.data import bpe
from mingpt.data import text as text_module
from mingpt.data.cache import node_lock
from mingpt.data.source import Source
from mingpt.data.text import TextData, open_text
from mingpt.data.vocabulary import Bytes, Characters
from mingpt.data.windows import TokenFile, WindowDataset
from mingpt.errors import TransientError, UserError
from told import Told

SENTENCE = "der Bär, größer – 漢字 🙂\n"


def settings_for(path: Path | str, tmp_path: Path, **changes: object) -> TextData:
    return TextData.model_validate(
        {"path": str(path), "cache_dir": str(tmp_path / "cache"), "val_fraction": 0.0} | changes
    )


def written(tmp_path: Path, content: bytes | str) -> Path:
    path = tmp_path / "source.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def opened(content: bytes | str, tmp_path: Path, block_size: int = 1, **changes: object) -> Source:
    return open_text(settings_for(written(tmp_path, content), tmp_path, **changes), block_size)


def file_of(text: Source) -> TokenFile:
    assert isinstance(text.train, WindowDataset)
    assert isinstance(text.train.tokens, TokenFile)
    return text.train.tokens


def all_tokens(text: Source) -> list[int]:
    tokens: list[int] = file_of(text).mapped.tolist()
    return tokens


def cached(tmp_path: Path) -> list[str]:
    """The cache's files. filelock leaves its lock files on some systems and not on others."""
    return sorted(p.name for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock")


# --- tokens ---


@pytest.mark.parametrize("content", ["hello, world", "\ufeffa\r\nb\x00", SENTENCE])
def test_characters_are_numbered_by_their_rank_in_the_sorted_vocabulary(tmp_path: Path, content: str) -> None:
    text = opened(content, tmp_path)
    assert text.vocabulary == Characters("".join(sorted(set(content))))
    assert all_tokens(text) == [sorted(set(content)).index(c) for c in content]
    assert text.sha256 == sha256(content.encode()).hexdigest()


def test_byte_tokens_are_the_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) + b"\xff\xfe"  # not UTF-8
    text = opened(content, tmp_path, tokens="byte")
    assert bytes(all_tokens(text)) == content
    assert text.vocabulary == Bytes()
    assert Bytes().decode([97, 0xC3]) == "a\ufffd"  # a model may well generate half of one


def test_a_byte_prompt_from_a_command_line_that_is_not_utf8_keeps_its_bytes() -> None:
    assert Bytes().encode(os.fsdecode(b"a\xff")) == [97, 0xFF]
    with pytest.raises(UserError):
        Bytes().encode("\ud800")


@pytest.mark.parametrize(
    ("characters", "dtype"), [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)]
)
def test_tokens_are_stored_in_the_smallest_type_that_holds_them(
    tmp_path: Path, characters: int, dtype: type[np.generic]
) -> None:
    points = [p for p in range(0x20, 0x20000) if not 0xD800 <= p < 0xE000][:characters]
    text = opened("".join(map(chr, points)), tmp_path)
    assert file_of(text).mapped.dtype == dtype
    assert all_tokens(text) == list(range(characters))


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
@pytest.mark.parametrize("block", [1, 3, 7])
def test_tokens_are_those_of_the_whole_text_however_small_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, block: int
) -> None:
    """Characters of up to four bytes lie across the blocks; pieces of bpe end where those of the whole text do."""
    monkeypatch.setattr(text_module, "BLOCK", block)
    monkeypatch.setattr(bpe, "PIECE", 16)
    content = f"{SENTENCE}the king woe\n" * 5
    tokenizer = str(bpe_kit.write_gpt2(tmp_path / "gpt2")) if kind == "bpe" else None
    text = opened(content, tmp_path, tokens=kind, tokenizer=tokenizer, val_fraction=0.25)
    expected: list[int] = {
        "char": [sorted(set(content)).index(c) for c in content],
        "byte": list(content.encode()),
        "bpe": bpe_kit.small().encode(content),
    }[kind]
    assert all_tokens(text) == expected
    assert text.sha256 == sha256(content.encode()).hexdigest()
    assert isinstance(text.train, WindowDataset)
    assert text.train.stop == round(len(expected) * 0.75)


MEASURE = """
import sys
from mingpt.data.text import TextData
import mingpt.data.text

def peak():
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    return int(line.split()[1]) // 1024

before = peak()
source = TextData(path=sys.argv[1], tokens=sys.argv[2], cache_dir=sys.argv[3]).open(8, 1)
print(source.sha256, peak() - before)
"""


@pytest.mark.parametrize("kind", ["char", pytest.param("byte", marks=pytest.mark.slow)])
def test_a_large_text_is_read_in_little_memory_which_is_said_before(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "source.txt"
    content = SENTENCE.encode() * 2_500_000
    path.write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), kind, str(tmp_path / "cache")],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    first, *_, last = done.stdout.splitlines()
    assert f"data.path={path}" in first
    digest, mib = last.split()
    assert digest == sha256(content).hexdigest()
    assert int(mib) < 80  # the text has 83 MiB


def test_a_text_that_changes_while_it_is_read_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "to be or not to be")
    points = text_module._Text.points

    def then_written(text: text_module._Text) -> Iterator[NDArray[np.uint32]]:
        yield from points(text)
        path.write_text("to do or not to do")

    monkeypatch.setattr(text_module._Text, "points", then_written)
    with pytest.raises(TransientError, match=rf"^data\.path={path}: it has changed"):
        open_text(settings_for(path, tmp_path), 1)
    assert cached(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "content", "warns"),
    [
        ("a.csv", "name,text\nking,woe\n", True),
        ("a.txt", '{"text": "to be"}\n{"text": "or not"}\n', True),
        ("a.bin", "to\0be", True),
        ("a.txt", "{to be} or not", False),
    ],
)
def test_what_is_no_plain_text_is_trained_on_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, warns: bool
) -> None:
    (tmp_path / name).write_text(content)
    open_text(settings_for(tmp_path / name, tmp_path), 1)
    assert capsys.readouterr().out.startswith(f"WARNING: data.path={tmp_path / name}") == warns


# --- the cache ---


@pytest.mark.parametrize("how", ["no room", "full"])
def test_a_disk_that_is_full_is_a_mistake_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    path = written(tmp_path, "to be or not")
    with monkeypatch.context() as broken:
        if how == "full":
            broken.setattr(os, "replace", full)
        else:
            broken.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(12, 1, 11))
        assert problem(settings_for(path, tmp_path)).startswith(f"data.cache_dir={tmp_path / 'cache'}: ")
    assert cached(tmp_path) == []
    assert len(all_tokens(open_text(settings_for(path, tmp_path), 1))) == 12


def test_a_second_opening_takes_the_cache_whatever_the_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "to be or not to be")
    first = open_text(settings_for(path, tmp_path), 1)
    with monkeypatch.context() as unread:
        unread.setattr(text_module, "_encode", pytest.fail)
        second = open_text(settings_for(path, tmp_path, val_fraction=0.5, stride=3), 2)
    assert file_of(second).path == file_of(first).path
    assert (all_tokens(second), second.vocabulary, second.sha256) == (all_tokens(first), first.vocabulary, first.sha256)
    assert open_text(settings_for(path, tmp_path, tokens="byte"), 1).vocabulary == Bytes()
    changed = opened("to do or not to be", tmp_path)  # as long as the first
    assert isinstance(changed.vocabulary, Characters)
    assert changed.vocabulary.decode(all_tokens(changed)) == "to do or not to be"
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
@pytest.mark.parametrize("how", ["missing", "empty", "cut", "zeros"])
def test_a_damaged_entry_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, how: str
) -> None:
    """As after a power cut: the names are there, and not all of the content."""
    first = all_tokens(opened("to be or not to be", tmp_path))
    path = next((tmp_path / "cache").glob(f"*{suffix}"))
    whole = path.read_bytes()
    path.unlink()
    if how != "missing":
        path.write_bytes({"empty": b"", "cut": whole[:-3], "zeros": whole[:-8] + bytes(8)}[how])
    capsys.readouterr()
    assert all_tokens(open_text(settings_for(tmp_path / "source.txt", tmp_path), 1)) == first
    assert (path.name in capsys.readouterr().out) == (how != "missing")
    assert path.read_bytes() == whole


def test_who_has_waited_for_another_process_takes_what_that_has_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings_for(written(tmp_path, "to be or not"), tmp_path)
    acquire, theirs = FileLock.acquire, list[Source]()

    def overtaken(file: FileLock, *arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(FileLock, "acquire", acquire)
        theirs.append(open_text(config, 1))
        monkeypatch.setattr(text_module, "_encode", pytest.fail)
        return acquire(file, *arguments, **options)

    monkeypatch.setattr(FileLock, "acquire", overtaken)
    ours = open_text(config, 1)
    assert [file_of(text).path for text in theirs] == [file_of(ours).path]
    assert len(all_tokens(ours)) == 12


# --- mistakes ---


def problem(config: TextData, block_size: int = 1) -> str:
    with pytest.raises(UserError) as error:
        open_text(config, block_size)
    return str(error.value)


@pytest.mark.parametrize(
    ("content", "settings", "block_size"),
    [
        (b"", {}, 1),
        (b"", {"tokens": "byte"}, 1),
        (b"aaaa", {}, 1),
        (b"abc\xffde", {}, 1),
        (b"a\xc3", {}, 1),
        (b"to be or not to be", {"val_fraction": 0.05}, 1),
        (b"abcdefghij", {"val_fraction": 0.2}, 8),
        (b"abc", {"cache_dir": "source.txt/cache"}, 1),  # below a file
        (None, {}, 1),
        (None, {"path": "."}, 1),
        (None, {"path": "memory://no/such.txt"}, 1),
        (None, {"path": "foo://x"}, 1),
        (None, {"path": "pipe"}, 1),
    ],
)
def test_what_cannot_be_read_is_a_mistake_and_leaves_no_cache_entry(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: Told,
    content: bytes | None,
    settings: dict[str, object],
    block_size: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    if content is not None:
        Path("source.txt").write_bytes(content)
    data = {"path": "source.txt", "cache_dir": "cache", "val_fraction": 0} | settings
    told(problem(TextData.model_validate(data), block_size), tmp_path)
    assert "val_fraction" in settings or not list(tmp_path.glob("cache/*.npy"))


def test_a_builder_that_never_ends_is_waited_for_no_longer_than_configured(tmp_path: Path) -> None:
    text = opened("abc", tmp_path)
    config = settings_for(tmp_path / "source.txt", tmp_path, cache_timeout_seconds=0.05)
    with FileLock(file_of(text).path.with_suffix(".lock")):
        assert "data.cache_timeout_seconds" in problem(config)
