"""mingpt.data.text: exact tokens, disjoint splits, one cache entry a node, and errors that name the key."""

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from filelock import FileLock, Timeout
from numpy.typing import NDArray

import bpe_kit
from mingpt.data import bpe
from mingpt.data import text as text_module
from mingpt.data.cache import ArrayFile, node_lock
from mingpt.data.kinds.text import TextData
from mingpt.data.source import Source
from mingpt.data.text import open_text
from mingpt.data.vocabulary import Bytes, Characters, TextVocabulary
from mingpt.data.windows import TokenFile, WindowDataset
from mingpt.errors import TransientError, UserError

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


def vocabulary_in(text: Source) -> TextVocabulary:
    assert isinstance(text.vocabulary, TextVocabulary)
    return text.vocabulary


def cached(tmp_path: Path) -> list[str]:
    """The cache's files. filelock leaves its lock files on some systems and not on others."""
    return sorted(p.name for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock")


# --- tokens ---


def test_characters_are_numbered_by_their_rank_in_the_sorted_vocabulary(tmp_path: Path) -> None:
    text = opened("hello, world", tmp_path)
    assert text.vocabulary == Characters(" ,dehlorw")
    assert text.vocabulary.size == 9
    assert all_tokens(text) == [4, 3, 5, 5, 6, 1, 0, 8, 6, 7, 5, 2]
    assert file_of(text).mapped.dtype == np.uint8
    assert text.sha256 == sha256(b"hello, world").hexdigest()


def test_a_character_is_a_code_point_however_many_bytes_it_has(tmp_path: Path) -> None:
    text = opened(SENTENCE, tmp_path)
    assert text.vocabulary == Characters("".join(sorted(set(SENTENCE))))
    assert len(all_tokens(text)) == len(SENTENCE)
    assert vocabulary_in(text).decode(all_tokens(text)) == SENTENCE
    assert vocabulary_in(text).encode(SENTENCE) == all_tokens(text)


def test_line_endings_and_a_byte_order_mark_are_characters_like_others(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbfa\r\nb\x00"
    assert opened(content, tmp_path).vocabulary == Characters("\x00\n\rab\ufeff")


def test_byte_tokens_are_the_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) + b"\xff\xfe"  # not UTF-8
    text = opened(content, tmp_path, tokens="byte")
    assert bytes(all_tokens(text)) == content
    assert text.vocabulary == Bytes()
    assert text.vocabulary.size == 256


def test_byte_vocabulary_goes_through_utf8_and_survives_a_torn_character() -> None:
    vocabulary = Bytes()
    assert vocabulary.encode("aé") == [97, 0xC3, 0xA9]
    assert vocabulary.decode([97, 0xC3, 0xA9]) == "aé"
    assert vocabulary.decode([97, 0xC3]) == "a\ufffd"  # a model may well generate half of one


def test_a_byte_prompt_from_a_command_line_that_is_not_utf8_keeps_its_bytes() -> None:
    assert Bytes().encode(os.fsdecode(b"a\xff")) == [97, 0xFF]
    with pytest.raises(UserError, match=r"^the text is no Unicode: "):
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


def test_a_prompt_with_unknown_characters_is_a_mistake_that_shows_them() -> None:
    with pytest.raises(UserError, match=r"^the text has characters that the model never saw: '!z'$"):
        Characters("abc").encode("zab!z")


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
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
from mingpt.data.kinds.text import TextData
import mingpt.data.text

def peak():
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    return int(line.split()[1]) // 1024

before = peak()
source = TextData(path=sys.argv[1], tokens=sys.argv[2], cache_dir=sys.argv[3]).open(8, 1)
print(source.sha256, peak() - before)
"""


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_a_large_text_is_read_in_little_memory_which_is_said_before(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "source.txt"
    content = SENTENCE.encode() * 2_500_000
    path.write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), kind, str(tmp_path / "cache")],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    first, *_, last = done.stdout.splitlines()
    assert first == f"reading data.path={path}: 0.09 GB"
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
    ("name", "content", "what"),
    [
        ("a.csv", "name,text\nking,woe\n", "CSV"),
        ("a.txt", '{"text": "to be"}\n{"text": "or not"}\n', "JSON lines"),
        ("a.bin", "to\0be", "binary data"),
        ("a.txt", "{to be} or not", None),
    ],
)
def test_what_is_no_plain_text_is_trained_on_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, what: str | None
) -> None:
    (tmp_path / name).write_text(content)
    open_text(settings_for(tmp_path / name, tmp_path), 1)
    told = capsys.readouterr().out
    assert told.startswith(f"WARNING: data.path={tmp_path / name}: this looks like {what}") == (what is not None)
    assert ("`mingpt prepare`" in told and "data=chat" in told) == (what is not None)


# --- the cache ---


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_tokens_that_the_disk_has_no_room_for_are_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = written(tmp_path, "to be or not")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(12, 1, 11))
        message = problem(settings_for(path, tmp_path, tokens=kind))
    assert message.startswith(f"data.cache_dir={tmp_path / 'cache'}: 0.00 GB are needed")
    assert cached(tmp_path) == []
    assert len(all_tokens(open_text(settings_for(path, tmp_path, tokens=kind), 1))) == 12


def test_an_empty_block_begins_an_array_once(tmp_path: Path) -> None:
    """A tokenizer may have no tokens for the beginning of a text."""
    with open(tmp_path / "array.npy", "wb") as file:
        array = ArrayFile(file)
        for block in ([], [258, 1], []):
            array.append(np.array(block, np.uint16))
        array.finish()
    assert np.load(tmp_path / "array.npy").tolist() == [258, 1]


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


def test_a_second_opening_takes_the_cache_and_never_reads_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened("to be or not to be", tmp_path)
    before = file_of(first).path.stat()
    names = cached(tmp_path)
    assert [Path(n).suffix for n in names] == [".json", ".npy"]

    monkeypatch.setattr(text_module, "_encode", pytest.fail)
    second = open_text(settings_for(tmp_path / "source.txt", tmp_path), 1)
    after = file_of(second).path.stat()
    assert file_of(second).path == file_of(first).path
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert cached(tmp_path) == names
    assert (all_tokens(second), second.vocabulary, second.sha256) == (all_tokens(first), first.vocabulary, first.sha256)


def test_a_changed_file_gets_an_entry_of_its_own(tmp_path: Path) -> None:
    first = opened("to be or not", tmp_path)
    second = opened("to do or not", tmp_path)  # as long as the first
    assert file_of(first).path != file_of(second).path
    assert vocabulary_in(first).decode(all_tokens(first)) == "to be or not"
    assert vocabulary_in(second).decode(all_tokens(second)) == "to do or not"
    assert len(cached(tmp_path)) == 4


def test_another_kind_of_token_gets_an_entry_of_its_own(tmp_path: Path) -> None:
    path = written(tmp_path, "abab")  # once: written again it would be another file, whatever the tokens
    characters, as_bytes = (open_text(settings_for(path, tmp_path, tokens=kind), 1) for kind in ("char", "byte"))
    assert all_tokens(characters) == [0, 1, 0, 1]
    assert all_tokens(as_bytes) == [97, 98, 97, 98]


def test_another_split_or_stride_uses_the_same_entry(tmp_path: Path) -> None:
    config = settings_for(written(tmp_path, "to be or not"), tmp_path)
    paths = {
        file_of(open_text(config.model_copy(update=changes), block_size)).path
        for changes in ({}, {"val_fraction": 0.5}, {"stride": 3})
        for block_size in (1, 2)
    }
    assert len(paths) == 1


def test_tokens_without_their_description_are_built_anew(tmp_path: Path) -> None:
    """What a builder leaves that was killed between its two files."""
    first = opened("to be or not", tmp_path)
    expected = all_tokens(first)
    file_of(first).path.with_suffix(".json").unlink()
    file_of(first).path.write_bytes(b"torn")
    assert all_tokens(open_text(settings_for(tmp_path / "source.txt", tmp_path), 1)) == expected


@pytest.mark.parametrize("suffix", [".json", ".npy"])
@pytest.mark.parametrize("how", ["empty", "cut", "zeros"])
def test_a_damaged_entry_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, how: str
) -> None:
    """As after a power cut: the names are there, and not all of the content."""
    first = all_tokens(opened("to be or not to be", tmp_path))
    path = next((tmp_path / "cache").glob(f"*{suffix}"))
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": whole[:-3], "zeros": whole[:-8] + bytes(8)}[how])
    capsys.readouterr()
    assert all_tokens(open_text(settings_for(tmp_path / "source.txt", tmp_path), 1)) == first
    told = capsys.readouterr().out
    assert told.startswith(f"data.cache_dir={tmp_path / 'cache'}: ")
    assert path.name in told
    assert told.endswith(" is damaged: both are made again\n")
    assert path.read_bytes() == whole


def test_a_failure_while_building_leaves_no_file_and_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", full)
        with pytest.raises(UserError) as error:
            opened("to be or not", tmp_path)
    assert str(error.value).startswith(f"data.cache_dir={tmp_path / 'cache'}: the disk is full")
    assert cached(tmp_path) == []
    assert len(all_tokens(open_text(settings_for(tmp_path / "source.txt", tmp_path), 1))) == 12


def open_with_others(config: TextData, start: Barrier, builds: Path) -> tuple[str, int, str]:
    """In a process of its own: open the text when all are ready, noting each tokenization in the folder `builds`."""
    encode = text_module._encode

    def noted(*arguments: Any) -> dict[str, Any]:
        (builds / str(os.getpid())).touch()
        return encode(*arguments)

    text_module._encode = noted  # type: ignore[assignment]
    start.wait(timeout=600)
    text = open_text(config, 1)
    content = np.asarray(file_of(text).mapped).tobytes()
    return sha256(content).hexdigest(), file_of(text).path.stat().st_ino, str(text.vocabulary.to_json()["characters"])


def test_of_several_processes_at_once_one_builds_and_all_get_the_same(tmp_path: Path) -> None:
    content = "".join(map(chr, range(32, 127))) * 20_000  # takes long enough to tokenize that all would be at it
    config = settings_for(written(tmp_path, content), tmp_path)
    (builds := tmp_path / "builds").mkdir()
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager, spawn.Pool(4) as pool:
        start = manager.Barrier(4)
        arguments = [(config, start, builds)] * 4
        results = pool.starmap(open_with_others, arguments, chunksize=1)
    expected = np.tile(np.arange(95, dtype=np.uint8), 20_000)
    assert {digest for digest, _, _ in results} == {sha256(expected.tobytes()).hexdigest()}
    assert {characters for _, _, characters in results} == {"".join(map(chr, range(32, 127)))}
    assert len({inode for _, inode, _ in results}) == 1
    assert len(list(builds.iterdir())) == 1
    assert [Path(n).suffix for n in cached(tmp_path)] == [".json", ".npy"]


def test_a_text_can_lie_at_any_url_that_fsspec_knows(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/texts/of-test-text.txt", b"abcab")
    try:
        text = open_text(settings_for("memory://texts/of-test-text.txt", tmp_path), 1)
    finally:
        memory.rm_file("/texts/of-test-text.txt")
    assert all_tokens(text) == [0, 1, 2, 0, 1]
    assert text.sha256 == sha256(b"abcab").hexdigest()


# --- mistakes ---


def problem(config: TextData, block_size: int = 1) -> str:
    with pytest.raises(UserError) as error:
        open_text(config, block_size)
    return str(error.value)


@pytest.mark.parametrize(
    ("content", "tokens", "expected"),
    [
        (b"", "char", "the file is empty: name another"),
        (b"", "byte", "the file is empty: name another"),
        (b"aaaa", "char", "only one character, 'a', over and over: nothing to learn; name another text"),
        (b"abc\xffde", "char", "not UTF-8 at byte 3: convert the file, or use data.tokens=byte"),
        ("aé".encode()[:2], "char", "not UTF-8 at byte 1: convert the file, or use data.tokens=byte"),
    ],
)
def test_a_file_that_is_no_text_is_a_mistake_and_leaves_no_cache_entry(
    tmp_path: Path, content: bytes, tokens: str, expected: str
) -> None:
    path = written(tmp_path, content)
    assert problem(settings_for(path, tmp_path, tokens=tokens)) == f"data.path={path}: {expected}"
    assert cached(tmp_path) == []


def test_a_missing_file_is_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "missing.txt"
    assert problem(settings_for(path, tmp_path)) == (
        f"data.path={path}: there is no such file or bucket: check the spelling"
    )
    assert problem(settings_for("memory://no/such.txt", tmp_path)).startswith(
        "data.path=memory://no/such.txt: there is no"
    )


def test_a_folder_is_a_mistake(tmp_path: Path) -> None:
    assert problem(settings_for(tmp_path, tmp_path)) == f"data.path={tmp_path}: a folder; name one text file"


def test_a_pipe_is_a_mistake_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    config = settings_for(tmp_path / "pipe", tmp_path)
    assert problem(config) == f"data.path={tmp_path / 'pipe'}: no regular file; name one text file"


def test_a_share_for_validation_that_comes_to_nothing_is_a_mistake(tmp_path: Path) -> None:
    path = written(tmp_path, "to be or not to be")
    message = problem(settings_for(path, tmp_path, val_fraction=0.05))
    assert message.startswith(f"data.val_fraction=0.05 of the 18 tokens of data.path={path} leaves nothing")
    assert len(open_text(settings_for(path, tmp_path, val_fraction=0.12), 1).validation) == 1  # two tokens, one target


def test_an_unknown_scheme_is_a_mistake(tmp_path: Path) -> None:
    message = problem(settings_for("foo://x", tmp_path))
    assert message.startswith("data.path=foo://x: ")
    assert "use a local path, s3://…" in message


def test_a_text_too_short_for_a_block_is_a_mistake_that_names_both_keys(tmp_path: Path) -> None:
    path = written(tmp_path, "abcdefghij")
    config = settings_for(path, tmp_path, val_fraction=0.2)
    assert len(open_text(config, 7).train) == 1  # eight training tokens: seven and the one after
    message = problem(config, 8)
    assert message.startswith(f"model.block_size=8 is longer than the data: data.path={path} has 8 training tokens")


def test_a_cache_that_cannot_be_there_is_a_mistake(tmp_path: Path) -> None:
    path = written(tmp_path, "abc")
    config = TextData(path=str(path), cache_dir=str(path / "cache"))  # below a file
    assert problem(config).startswith(f"data.cache_dir={path / 'cache'}: ")


def test_a_builder_that_never_ends_is_waited_for_no_longer_than_configured(tmp_path: Path) -> None:
    text = opened("abc", tmp_path)
    config = settings_for(tmp_path / "source.txt", tmp_path, cache_timeout_seconds=0.05)
    with FileLock(file_of(text).path.with_suffix(".lock")):
        assert "data.cache_timeout_seconds" in problem(config)
