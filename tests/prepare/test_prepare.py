"""mingpt.data.prepare: the same bytes whatever the processes and the kills, every document once, and clear mistakes."""

import bz2
import csv
import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import fsspec
import numpy as np
import pytest

import bpe_kit
import web_kit
from mingpt.data import bpe
from mingpt.data.dataset import DataSet, Split, from_bytes, tokens_in
from mingpt.errors import UserError
from mingpt.prepare import documents, sources
from mingpt.prepare.documents import Options, is_validation
from mingpt.prepare.prepare import main, prepare, progress
from mingpt.prepare.shardwriter import ShardWriter
from mingpt.prepare.sources import File
from prepare_kit import Killed, files, some_texts, write_jsonl

VOCABULARY = bpe_kit.small()


def prepared(sources: Sequence[Path | str], out: Path | str, **options: object) -> DataSet:
    known = {k: options.pop(k) for k in ("separator", "field", "val_fraction") if k in options}
    return prepare([str(s) for s in sources], str(out), VOCABULARY, Options(**known), **options)  # type: ignore[arg-type]


def row(out: Path, dataset: DataSet, split: str) -> list[int]:
    """A split's tokens, read as anybody would."""
    shards = [np.fromfile(out / s.name, dtype=f"<u{2 if dataset.dtype == 'uint16' else 4}") for s in dataset.shards]
    return [int(t) for s, tokens in zip(dataset.shards, shards, strict=True) if s.split == split for t in tokens]


def expected(texts: Sequence[str], fraction: float, validation: bool) -> list[int]:
    chosen = [t for t in texts if is_validation(t, fraction) == validation]
    return [i for t in chosen for i in (*VOCABULARY.encode(t), VOCABULARY.end_of_text)]


# --- what comes out ---


@pytest.mark.parametrize("shard_tokens", [7, 64, 1 << 25])
def test_every_document_is_there_once_in_order_followed_by_its_end(tmp_path: Path, shard_tokens: int) -> None:
    texts = some_texts(60)
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    dataset = prepared([source], tmp_path / "out", val_fraction=0.2, shard_tokens=shard_tokens)
    for split, validation in (("train", False), ("validation", True)):
        assert row(tmp_path / "out", dataset, split) == expected(texts, 0.2, validation)
    assert 0 < sum(s.documents for s in dataset.of("validation")) < 60
    assert sum(s.documents for s in dataset.shards) == 60
    assert all(s.tokens == shard_tokens for s in dataset.of("train")[:-1])
    assert (dataset.dtype, dataset.tokenizer) == ("uint16", VOCABULARY.to_json())
    content = files(tmp_path / "out")
    assert from_bytes(content.pop("manifest.json"), "x") == dataset
    assert json.loads(content.pop("sources.json"))["made_from"] == dataset.made_from
    assert content.keys() == {s.name for s in dataset.shards}
    assert {n: sha256(c).hexdigest() for n, c in content.items()} == {s.name: s.sha256 for s in dataset.shards}
    assert sum(map(len, content.values())) == 2 * tokens_in(dataset.shards)


def test_every_form_gives_the_same_tokens(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [t.replace("\n\n", "\n") for t in some_texts(50)]
    write_jsonl(tmp_path / "a.jsonl", texts, "content")
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    parquet.write_table(pyarrow.table({"content": [*texts, None]}), tmp_path / "a.parquet", row_group_size=7)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "b.txt.bz2").write_bytes(bz2.compress((tmp_path / "a.txt").read_bytes()))
    shards = []
    with (tmp_path / "a.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["id", "content"], *enumerate(texts)])
    (tmp_path / "c.csv.zst").write_bytes(pyarrow.compress((tmp_path / "a.csv").read_bytes(), "zstd", asbytes=True))
    for name in ("a.jsonl", "a.txt", "a.parquet", "a.jsonl.gz", "b.txt.bz2", "a.csv", "c.csv.zst"):
        out = tmp_path / f"out-{name}"
        shards.append(prepared([tmp_path / name], out, separator="\n\n", field="content", val_fraction=0.1).shards)
    assert all(s == shards[0] for s in shards)
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "texts" / f"{i:03d}.txt").write_text(text)
    one_a_file = prepared([f"{tmp_path}/texts/*.txt"], tmp_path / "out", val_fraction=0.1)
    assert one_a_file.shards == shards[0]


def test_memory_is_bounded_and_no_cut_changes_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and reads of a few bytes, so that each border falls everywhere."""
    texts = some_texts(40)
    long = " ".join(texts)
    (tmp_path / "a.txt").write_text("=-=".join([*texts[:20], "", long, *texts[20:]]))
    whole = prepared([tmp_path / "a.txt"], tmp_path / "whole", separator="=-=", val_fraction=0.0)
    assert row(tmp_path / "whole", whole, "train") == expected([*texts[:20], long, *texts[20:]], 0, False)
    for read, piece in ((5, 1 << 20), (3, 64), (1000, 64)):
        monkeypatch.setattr(documents, "READ", read)
        monkeypatch.setattr(bpe, "PIECE", piece)
        cut = prepared([tmp_path / "a.txt"], tmp_path / f"{read}-{piece}", separator="=-=", val_fraction=0.0)
        assert cut.shards == whole.shards


def test_a_document_goes_to_one_split_whatever_is_beside_it(tmp_path: Path) -> None:
    texts = some_texts(40)
    both = prepared([write_jsonl(tmp_path / "a.jsonl", texts)], tmp_path / "a", val_fraction=0.3)
    half = prepared([write_jsonl(tmp_path / "b.jsonl", texts[::2])], tmp_path / "b", val_fraction=0.3)
    ends = VOCABULARY.end_of_text
    for split in ("train", "validation"):
        whole, part = (row(tmp_path / name, d, split) for name, d in (("a", both), ("b", half)))
        assert part.count(ends) < whole.count(ends)
        assert part == expected(texts[::2], 0.3, split == "validation")
    assert [is_validation("same", f) for f in (0.0, 1.0)] == [False, True]


@pytest.mark.slow
def test_the_number_of_processes_changes_no_byte(tmp_path: Path) -> None:
    for i in range(4):
        write_jsonl(tmp_path / f"{i}.jsonl", some_texts(300, seed=i))
    command = ["--tokenizer", str(bpe_kit.write_gpt2(tmp_path / "gpt2")), "--shard-tokens", "1000"]
    for processes in (1, 3):
        arguments = [f"{tmp_path}/*.jsonl", "--out", f"{tmp_path}/{processes}", "--processes", str(processes)]
        assert main([*arguments, *command]) == 0
    assert files(tmp_path / "1") == files(tmp_path / "3")


def test_any_url_will_do_for_both_ends(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    texts = some_texts(30)
    memory.pipe_file("/corpus/a.jsonl", write_jsonl(tmp_path / "a.jsonl", texts).read_bytes())
    try:
        there = prepared(["memory://corpus/*.jsonl"], "memory://corpus/out", val_fraction=0.1, shard_tokens=50)
        here = prepared([tmp_path / "a.jsonl"], tmp_path / "out", val_fraction=0.1, shard_tokens=50)
        assert there == here
        content = {n.rpartition("/")[2]: memory.cat_file(n) for n in memory.ls("/corpus/out", detail=False)}
        ours = files(tmp_path / "out")
        assert content.pop("sources.json") != ours.pop("sources.json")  # other versions of the same content
        assert content == ours
    finally:
        memory.rm("/corpus", recursive=True)


# --- killed and started again ---


def test_finished_files_are_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingpt.prepare.prepare.RECORD_SECONDS", 0)
    for i in range(6):
        write_jsonl(tmp_path / f"{i}.jsonl", some_texts(30, seed=i))
    sources = [f"{tmp_path}/*.jsonl"]
    undisturbed = prepared(sources, tmp_path / "undisturbed", val_fraction=0.1, shard_tokens=100)
    read, real, add = list[str](), documents.blocks, ShardWriter.add

    def watched(files: Sequence[File], options: Options, bad: documents.Bad, first: int) -> Iterator[documents.Block]:
        for block in real(files, options, bad, first):
            read.append(block.file.url.rpartition("/")[2])
            yield block

    def dying_after(adds: int) -> Callable[[ShardWriter, Split, bytes], None]:
        def dying(self: ShardWriter, split: Split, raw: bytes) -> None:
            nonlocal adds
            adds -= 1
            if adds < 0:
                raise Killed
            add(self, split, raw)

        return dying

    monkeypatch.setattr("mingpt.prepare.prepare.blocks", watched)
    finished = []
    for adds in (70, 10, 70):  # a file has 30 documents
        monkeypatch.setattr(ShardWriter, "add", dying_after(adds))
        with pytest.raises(Killed):
            prepared(sources, tmp_path / "out", val_fraction=0.1, shard_tokens=100)
        assert not (tmp_path / "out" / "manifest.json").exists()
        finished.append(json.loads((tmp_path / "out" / "progress.json").read_text())["done"]["files"])
    assert finished == [2, 2, 4]
    monkeypatch.setattr(ShardWriter, "add", add)
    read.clear()
    assert prepared(sources, tmp_path / "out", val_fraction=0.1, shard_tokens=100) == undisturbed
    assert read == ["4.jsonl", "5.jsonl"]
    assert files(tmp_path / "out") == files(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_sigkill_in_the_middle_changes_no_byte(tmp_path: Path, processes: int) -> None:
    for i in range(40):
        write_jsonl(tmp_path / f"{i:02d}.jsonl", some_texts(400, seed=i))
    tokenizer = str(bpe_kit.write_gpt2(tmp_path / "gpt2"))

    def command(out: str) -> list[str]:
        places = [f"{tmp_path}/*.jsonl", "--out", f"{tmp_path}/{out}", "--tokenizer", tokenizer]
        rest = ["--shard-tokens", "5000", "--processes", str(processes)]
        return [sys.executable, "-m", "mingpt.data.prepare", *places, *rest]

    subprocess.run(command("undisturbed"), check=True, capture_output=True, timeout=600)
    kills = 0
    while not (tmp_path / "out" / "manifest.json").exists():
        process = subprocess.Popen(command("out"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        before = noted(tmp_path / "out")
        while process.poll() is None and noted(tmp_path / "out") == before:
            time.sleep(0.002)
        if process.poll() is None and kills < 3:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        _, said = process.communicate(timeout=600)
        assert process.returncode in (0, -signal.SIGKILL), said
    assert kills >= 1
    assert files(tmp_path / "out") == files(tmp_path / "undisturbed")


def noted(out: Path) -> bytes:
    try:
        return (out / "progress.json").read_bytes()
    except FileNotFoundError:
        return b""


def test_a_finished_data_set_is_left_alone_and_another_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(20))
    first = prepared([source], tmp_path / "out")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    assert prepared([source], tmp_path / "out") == first
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()} == before
    with pytest.raises(
        UserError, match=r"another data set is there, of other sources or options, or .*: choose another folder$"
    ):
        prepared([source], tmp_path / "out", val_fraction=0.5)


@pytest.mark.parametrize("form", ["jsonl", "txt.gz", "parquet"])
def test_a_source_that_changed_under_its_name_and_size_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    def write(folder: str, word: str) -> Path:
        path = tmp_path / folder / f"a.{form}"
        path.parent.mkdir(exist_ok=True)
        if form == "parquet":
            pyarrow = pytest.importorskip("pyarrow")
            from pyarrow import parquet

            parquet.write_table(pyarrow.table({"text": [f"the {word}"]}), path)
        elif form == "txt.gz":
            path.write_bytes(gzip.compress(word.encode(), compresslevel=0, mtime=0))
        else:
            write_jsonl(path, [word])
        return path

    source = write("a", "king")
    first = prepared([source], tmp_path / "out")
    size = source.stat().st_size
    capsys.readouterr()
    assert prepared([source], tmp_path / "out") == first
    assert capsys.readouterr().out == f"prepare: --out={tmp_path}/out: already there, made of these sources\n"
    assert write("copy", "king").stat().st_size == size
    assert prepared([tmp_path / "copy" / source.name], tmp_path / "out") == first  # of equal content
    assert "a data set is there; reading the sources to see" in capsys.readouterr().out
    for other in (write("other", "kine"), write("a", "wing")):
        assert other.stat().st_size == size
        with pytest.raises(
            UserError, match=r"another data set is there, of .* or of these before they changed: choose"
        ):
            prepared([other], tmp_path / "out")


def test_a_store_that_tells_no_versions_has_its_sources_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "VERSION_KEYS", ())
    monkeypatch.setattr(web_kit._Quiet, "date_time_string", lambda *_: "")
    with web_kit.served(tmp_path) as url:
        write_jsonl(tmp_path / "a.jsonl", ["king"])
        first = prepared([f"{url}/a.jsonl"], tmp_path / "out")
        assert prepared([f"{url}/a.jsonl"], tmp_path / "out") == first
        write_jsonl(tmp_path / "a.jsonl", ["wing"])
        with pytest.raises(UserError, match="another data set is there"):
            prepared([f"{url}/a.jsonl"], tmp_path / "out")


@pytest.mark.parametrize("name", ["train-00000.bin", "sources.json"])
def test_a_link_in_the_folder_leads_to_no_file_outside(tmp_path: Path, name: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(20))
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(victim)
    prepared([source], tmp_path / "out")
    assert victim.read_text() == "precious"
    assert not (tmp_path / "out" / name).is_symlink()


def test_a_begun_shard_that_is_a_link_is_not_cut_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(20))

    def killed(self: ShardWriter) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "close", killed)
        with pytest.raises(Killed):
            prepared([source], tmp_path / "out", val_fraction=0.0)
    victim = tmp_path / "victim"
    victim.write_text("precious" * 10_000)
    (shard := tmp_path / "out" / "train-00000.bin").unlink()
    shard.symlink_to(victim)
    with pytest.raises(UserError, match=r"left is damaged \(train-00000\.bin is a link\): delete the folder"):
        prepared([source], tmp_path / "out", val_fraction=0.0)
    assert victim.read_text() == "precious" * 10_000


def test_a_file_that_a_killed_one_was_writing_does_not_stay(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(20))
    (tmp_path / "out").mkdir()
    for name in (".manifest.json.123", ".progress.json.123", ".sources.json.123"):
        (tmp_path / "out" / name).touch()
    dataset = prepared([source], tmp_path / "out")
    assert sorted(files(tmp_path / "out")) == [
        "manifest.json",
        "sources.json",
        *(shard.name for shard in dataset.shards),
    ]


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-2])])
def test_a_data_set_that_has_lost_a_shard_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], object]
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(20))
    first = prepared([source], tmp_path / "out", shard_tokens=100)
    before = files(tmp_path / "out")
    spoil(tmp_path / "out" / first.shards[1].name)
    assert prepared([source], tmp_path / "out", shard_tokens=100) == first
    assert files(tmp_path / "out") == before
    told = capsys.readouterr().out
    assert f"missing or of another size: {first.shards[1].name}: the data set is made again" in told


def test_a_signature_in_an_address_is_no_part_of_the_name_and_never_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts := some_texts(20))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes(), mtime=0))
    (tmp_path / "a.doc").write_text("the king")
    tokenizer = ["--tokenizer", str(bpe_kit.write_gpt2(tmp_path / "gpt2")), "--processes", "1"]
    with web_kit.served(tmp_path) as url:
        signed = [f"{url}/{name}?X-Signature=s3cret*[1]" for name in ("a.jsonl", "b.jsonl.gz")]
        dataset = prepared(signed, tmp_path / "out", processes=1)
        again = [f"{url}/{name}?X-Signature=another" for name in ("a.jsonl", "b.jsonl.gz")]
        assert prepared(again, tmp_path / "out", processes=1) == dataset
        assert main([f"{url}/a.doc?X-Signature=s3cret", "--out", str(tmp_path / "other"), *tokenizer]) == 64
    assert row(tmp_path / "out", dataset, "train") == 2 * expected(texts, 0, False)
    told = capsys.readouterr()
    assert f"SOURCES={url}/a.doc?***: unknown form .doc" in told.err
    assert "s3cret" not in told.out + told.err


def test_an_address_without_a_files_name_is_told_apart_by_its_query(tmp_path: Path) -> None:
    (tmp_path / "download").write_text("the king")
    with web_kit.served(tmp_path) as url:  # it gives the same for any query: only the addresses differ
        prepared([f"{url}/download?id=1"], tmp_path / "out", form="text", processes=1)
        with pytest.raises(UserError, match="another data set is there, of other sources or options"):
            prepared([f"{url}/download?id=2"], tmp_path / "out", form="text", processes=1)


def test_a_server_that_cannot_be_reached_is_no_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with web_kit.served(tmp_path) as url:
        pass
    tokenizer = str(bpe_kit.write_gpt2(tmp_path / "gpt2"))
    assert main([f"{url}/a.txt", "--out", str(tmp_path / "out"), "--tokenizer", tokenizer]) == 70
    assert re.match(rf"error: SOURCES={url}/a\.txt: Cannot connect to host .*: try again;", capsys.readouterr().err)


def test_documents_that_all_go_to_training_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("the king")
    tokenizer = str(bpe_kit.write_gpt2(tmp_path / "gpt2"))
    arguments = [str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--tokenizer", tokenizer, "--processes", "1"]
    assert main([*arguments, "--separator", r"\n\n"]) == 0
    assert (
        "note: there is nothing to evaluate on: no document's hash falls into --val-fraction 0.01: "
        r"raise it, or cut the text into documents with --separator, as in '\n\n'" in capsys.readouterr().out
    )


def test_another_data_set_does_not_go_on_with_a_begun_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(20))

    def killed(self: ShardWriter) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "close", killed)
        with pytest.raises(Killed):
            prepared([source], tmp_path / "out")
    with pytest.raises(UserError, match=r"begun with other sources or options: give those again, or delete"):
        prepared([source], tmp_path / "out", val_fraction=0.5)
    (next((tmp_path / "out").glob("train*"))).write_bytes(b"")
    with pytest.raises(UserError, match=r"left is damaged \(train-00000\.bin is too short\): delete the folder"):
        prepared([source], tmp_path / "out")


# --- mistakes ---


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"text": "b"\n',
            r"line 3: cannot be read \(Expecting ',' delimiter: .* column 13 ",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"body": "b"}\n',
            r"line 2: .* \(no strings in the field 'text'; there are 'body'\): ",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n[1]',
            r"line 2: .*; there are none\): correct it, or give another --form ",
        ),
        ("a.jsonl", b'{"text": 5}', r"a\.jsonl line 1: .* \(no strings in the field 'text'; there are 'text'\)"),
        ("a.jsonl", b'{"text": "\xff"}', r"a\.jsonl line 1: .*'utf-8' codec can't decode byte 0xff in position 10"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl line 1: cannot be read \(maximum recursion"),
        (
            "a.txt",
            "größer".encode() + b"\xff",
            r"a\.txt: cannot be read as text \('utf-8' .* in position 8",
        ),
        (
            "a.txt",
            "größer".encode()[:3],
            r"a\.txt: cannot be read as text \(.* unexpected end of data\): ",
        ),
        ("a.txt", b"", r"SOURCES hold no text to train on"),
        ("a.txt.gz", b"no gzip", r"a\.txt\.gz: cannot be read as text \(Not a gzipped file"),
        (
            "a.txt.gz",
            gzip.compress(b"the king" * 99, mtime=0)[:-9],
            r"\.gz: cannot .* \(Compressed .*, or get it again",
        ),
        ("a.parquet", b"no parquet", r"a\.parquet: cannot be read as parquet \("),
        ("a.doc", b"the king", r"a\.doc: unknown form \.doc: give --form text, jsonl, csv or parquet"),
    ],
)
def test_bad_input_is_one_clear_error_and_exit_64(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, problem: str
) -> None:
    (tmp_path / name).write_bytes(content)
    tokenizer = str(bpe_kit.write_gpt2(tmp_path / "gpt2"))
    arguments = [str(tmp_path / name), "--out", str(tmp_path / "out"), "--tokenizer", tokenizer, "--processes", "1"]
    assert main(arguments) == 64
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert re.search(problem, told), told
    assert told.count("\n") == 1
    assert not (tmp_path / "out" / "manifest.json").exists()


BAD_LINES = {2: "{", 5: "null", 6: '{"text": null}', 9: '{"body": "b"}', 12: '{"text": "a"'}


def write_with_bad_lines(path: Path, texts: Sequence[str]) -> Path:
    lines = [json.dumps({"text": text}) for text in texts]
    for number, line in BAD_LINES.items():
        lines.insert(number - 1, line)
    path.write_text("\n".join(lines) + "\n")
    return path


def test_bad_lines_are_left_out_counted_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = some_texts(20)
    source = write_with_bad_lines(tmp_path / "a.jsonl", texts)
    dataset = prepared([source], tmp_path / "out", skip_bad=5)
    assert row(tmp_path / "out", dataset, "train") == expected(texts, 0, False)
    told = capsys.readouterr().out.splitlines()
    for line, number in zip(told, BAD_LINES, strict=False):
        assert line.startswith(f"prepare: left out: {source} line {number}: ")
    assert told[-1] == "prepare: 5 bad lines left out"
    with pytest.raises(UserError, match=r"a\.jsonl line 12: .*, and 4 before it were left out; --skip-bad N"):
        prepared([source], tmp_path / "four", skip_bad=4)
    with pytest.raises(
        UserError, match=r"a\.jsonl line 2: cannot be read \(.*\): .*; --skip-bad N leaves out up to N lines$"
    ):
        prepared([source], tmp_path / "none")


def test_bad_lines_of_finished_files_count_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingpt.prepare.prepare.RECORD_SECONDS", 0)
    for i in range(3):
        write_with_bad_lines(tmp_path / f"{i}.jsonl", some_texts(20, seed=i))
    sources = [tmp_path / f"{i}.jsonl" for i in range(3)]
    undisturbed = prepared(sources, tmp_path / "undisturbed", skip_bad=15)
    with pytest.raises(UserError, match=r"2\.jsonl line 9: .*, and 13 before it were left out"):
        prepared(sources, tmp_path / "out", skip_bad=13)
    assert json.loads((tmp_path / "out" / "progress.json").read_text())["done"]["files"] == 2
    with pytest.raises(UserError, match=r"2\.jsonl line 12: .*, and 14 before it were left out"):
        prepared(sources, tmp_path / "out", skip_bad=14)
    assert prepared(sources, tmp_path / "out", skip_bad=15) == undisturbed
    assert files(tmp_path / "out") == files(tmp_path / "undisturbed")


@pytest.mark.slow
def test_bad_lines_are_the_same_whatever_the_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "READ", 100)
    source = write_with_bad_lines(tmp_path / "a.jsonl", some_texts(20))
    told = []
    for processes in (1, 2):
        dataset = prepared([source], tmp_path / str(processes), skip_bad=5, processes=processes)
        assert sum(shard.documents for shard in dataset.shards) == 20
        with pytest.raises(UserError) as error:
            prepared([source], tmp_path / f"{processes}-3", skip_bad=3, processes=processes)
        said = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]  # others tell of progress
        told.append((str(error.value), said))
    assert told[0] == told[1]
    assert files(tmp_path / "1") == files(tmp_path / "2")


@pytest.mark.slow
def test_a_mistake_of_a_process_of_the_pool_is_told_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{')
    tokenizer = str(bpe_kit.write_gpt2(tmp_path / "gpt2"))
    assert (
        main([str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "o"), "--tokenizer", tokenizer, "--processes", "2"])
        == 64
    )
    assert "a.jsonl line 2: cannot be read" in capsys.readouterr().err


def test_a_files_name_and_content_move_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a\x1b[2J\nerror: no.jsonl").write_text('{"\\u001b]0;x\\u0007\\n": 1}\n{"text": "a"}\n')
    out = ["--out", str(tmp_path / "out"), "--tokenizer", str(bpe_kit.write_gpt2(tmp_path / "gpt2"))]
    assert main([f"{tmp_path}/a*.jsonl", *out, "--processes", "1", "--val-fraction", "0"]) == 64
    assert main([f"{tmp_path}/a*.jsonl", *out, "--processes", "1", "--val-fraction", "0", "--skip-bad", "1"]) == 0
    told = capsys.readouterr()
    assert "\x1b" not in told.out + told.err
    assert told.err.count("\n") == 1
    assert f"{tmp_path}/a\\x1b[2J\\nerror: no.jsonl line 1: cannot be read (no strings in the" in told.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["no.txt"], "no.txt: there is no such file or bucket"),
        (["no-*.txt"], "SOURCES=no-*.txt: no file is there"),
        (["."], "a folder: name the files in it, as in ./*.txt"),
        (["x", "--val-fraction", "1", "--processes", "0"], "2 problems"),
        (["x", "--tokenizer", "nowhere"], "--tokenizer=nowhere: there is no such file"),
    ],
)
def test_bad_arguments_exit_64(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    tokenizer = str(bpe_kit.write_gpt2(tmp_path / "gpt2"))
    assert main(["--out", str(tmp_path / "out"), "--tokenizer", tokenizer, *arguments]) == 64
    assert problem in capsys.readouterr().err


def test_parquet_columns_are_named_in_the_mistake(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": ["a"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: .*no strings in the field 'text'; there are 'body', 'id'"):
        prepared([tmp_path / "a.parquet"], tmp_path / "out")
    with pytest.raises(UserError, match=r"no strings in the field 'id'"):
        prepared([tmp_path / "a.parquet"], tmp_path / "out", field="id")


@pytest.mark.parametrize("damage", ["flipped", "no UTF-8"])
def test_damaged_parquet_is_a_mistake(tmp_path: Path, damage: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": some_texts(300)}), path, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[4:40] = b"\xff" * 36
        path.write_bytes(content)
    else:
        texts = pyarrow.array([b"\xff\xfe king"]).view(pyarrow.string())
        parquet.write_table(pyarrow.table({"text": texts}), path)
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as parquet \(.*, or get it again$"):
        prepared([path], tmp_path / "out")


def test_a_log_gets_whole_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(20))
    tokenizer = str(bpe_kit.write_gpt2(tmp_path / "gpt2"))
    out = str(tmp_path / "out")
    assert main([str(source), "--out", out, "--tokenizer", tokenizer, "--processes", "1", "--val-fraction", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"train on it: data=shards data.path={out}"
    assert lines[-3].endswith(" tokens of 20 documents in 1 shard")
    assert lines[-2] == "validation: 0 tokens of 0 documents in 0 shards"


def test_a_terminal_gets_one_line_that_is_drawn_again_and_a_log_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("mingpt.prepare.prepare.LOG_SECONDS", 0)
    with progress() as show:
        show(0.25, 1234)
    assert capsys.readouterr().out == "prepare:  25%  1,234 tokens\n"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress() as show:
        show(0.5, 1234)
    assert re.search(r"1,234 tokens .* 50% ", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()))
    assert capsys.readouterr().out == ""
