"""mingpt.data.prepare: the same bytes whatever the processes and the kills, every document once, and clear mistakes."""

import csv
import gzip
import io
import json
import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import get_args
from uuid import uuid4

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from mingpt.cli import cli
from mingpt.cli.parsers import parser_of
from mingpt.data import bpe
from mingpt.data.dataset import from_bytes
from mingpt.errors import UserError
from mingpt.prepare import documents, sources
from mingpt.prepare.documents import Options
from mingpt.prepare.prepare import token_count
from mingpt.prepare.sources import File, identity_of
from tests.kits import web_kit
from tests.kits.prepare_kit import (
    VOCABULARY,
    expected,
    files,
    into,
    jsonl,
    killed,
    prepared,
    row,
    some_texts,
    write_jsonl,
)
from tests.kits.told import Told

Captured = pytest.CaptureFixture[str]


def refused(*arguments: object, **options: object) -> str:
    with pytest.raises(UserError) as mistake:
        prepared(*arguments, **options)  # type: ignore[arg-type]
    return str(mistake.value)


def test_the_option_takes_the_forms_that_there_are() -> None:
    """Its parser names them itself: sources.py imports what a help text does not wait for."""
    form = next(action for action in parser_of("prepare")._actions if action.dest == "form")
    assert form.choices == get_args(sources.Form)


# --- what comes out ---


def test_every_document_is_there_once_in_order_followed_by_its_end(tmp_path: Path) -> None:
    texts = some_texts(60)
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    dataset = prepared([source], tmp_path / "out", val_fraction=0.2, shard_tokens=7)
    for split in ("train", "validation"):
        assert row(tmp_path / "out", dataset, split) == expected(texts, 0.2, split)
    assert 0 < sum(s.documents for s in dataset.of("validation")) < 60
    assert sum(s.documents for s in dataset.shards) == 60
    assert all(s.tokens == 7 for s in dataset.of("train")[:-1])
    assert dataset.tokenizer == VOCABULARY.to_json()
    content = files(tmp_path / "out")
    assert from_bytes(content.pop("manifest.json"), "x") == dataset
    assert json.loads(content.pop("sources.json"))["made_from"] == dataset.made_from
    assert {n: sha256(c).hexdigest() for n, c in content.items()} == {s.name: s.sha256 for s in dataset.shards}


def table(**columns: object) -> bytes:
    parquet.write_table(pyarrow.table(columns), stream := io.BytesIO(), row_group_size=7)
    return stream.getvalue()


def test_every_form_gives_the_same_tokens(tmp_path: Path) -> None:
    texts = [t.replace("\n\n", "\n") for t in some_texts(50)]
    lines, plain = jsonl(texts, "content").encode(), "\n\n".join(texts).encode()
    csv.writer(rows := io.StringIO()).writerows([["id", "content"], *enumerate(texts)])
    for i, text in enumerate(texts):
        (tmp_path / f"one-{i:03d}.txt").write_text(text)
    one_a_file = prepared([f"{tmp_path}/one-*.txt"], tmp_path / "out", val_fraction=0.1)
    for name, content in {
        "a.jsonl": lines,
        "a.txt": plain,
        "a.parquet": table(content=[*texts, None]),
        "a.jsonl.gz": gzip.compress(lines),
        "b.txt.gz": gzip.compress(plain),
        "c.csv.zst": pyarrow.compress(rows.getvalue().encode(), "zstd", asbytes=True),
    }.items():
        (tmp_path / name).write_bytes(content)
        out = tmp_path / f"out-{name}"
        made = prepared([tmp_path / name], out, separator="\n\n", field="content", val_fraction=0.1)
        assert made.shards == one_a_file.shards


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--tokens=3_000"]])
def test_the_number_of_processes_changes_no_byte_and_no_mistake(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    monkeypatch.setattr(documents, "READ", 2000)
    for i in range(4):
        write_jsonl(tmp_path / f"{i}.jsonl", some_texts(60, seed=i))
    good = (tmp_path / "0.jsonl").read_text().splitlines()
    (tmp_path / "bad.jsonl").write_text("\n".join([*good[:8], "null", *good[8:]]))
    how = ["--shard-tokens=500", *more]
    said = set()
    for processes in ("1", "3"):
        here = [*how, *into(tmp_path, f"--processes={processes}", f"--out={tmp_path}/{processes}")]
        assert cli.run("prepare", [f"{tmp_path}/[0-9].jsonl", *here]) == 0
        assert cli.run("prepare", [f"{tmp_path}/bad.jsonl", *here, f"--out={tmp_path}/out"]) == 64
        said.add(capsys.readouterr().err)
    [line] = said
    assert "bad.jsonl line 9: " in line
    assert files(tmp_path / "1") == files(tmp_path / "3")


def test_any_url_will_do_for_both_ends(tmp_path: Path) -> None:
    memory, place = fsspec.filesystem("memory"), f"memory://{uuid4().hex}"
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(30))
    memory.put_file(str(source), f"{place}/a.jsonl")
    there = prepared([f"{place}/*.jsonl"], f"{place}/out", val_fraction=0.1, shard_tokens=50)
    assert there == prepared([source], tmp_path / "out", val_fraction=0.1, shard_tokens=50)
    memory.get(f"{place}/out/", f"{tmp_path}/there/", recursive=True)
    theirs, ours = files(tmp_path / "there"), files(tmp_path / "out")
    assert theirs.pop("sources.json") != ours.pop("sources.json")  # other versions of the same content
    assert theirs == ours


# --- killed and started again ---


@pytest.mark.parametrize(("most", "first"), [(0, [0, 2, 2, 3, 6]), (10_000, [0, 2, 2, 3, 4])])
def test_killed_again_and_again_it_goes_on_after_the_last_finished_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, first: list[int]
) -> None:
    monkeypatch.setattr("mingpt.prepare.prepare.RECORD_SECONDS", 0)
    for i in range(6):
        write_jsonl(tmp_path / f"{i}.jsonl", some_texts(30, seed=i))
    given, options = [f"{tmp_path}/*.jsonl"], {"val_fraction": 0.1, "shard_tokens": 100, "most": most}
    undisturbed = prepared(given, tmp_path / "undisturbed", **options)
    begun, real = list[int](), documents.blocks

    def watched(files: Sequence[File], options: Options, first: int) -> Iterator[documents.Block]:
        begun.append(first)
        return real(files, options, first)

    monkeypatch.setattr("mingpt.prepare.prepare.blocks", watched)
    for method, calls in (("add", 70), ("add", 10), ("add", 50), ("put", 0)):  # put: the manifest
        with killed(method, calls):
            prepared(given, tmp_path / "out", **options)
        assert not (tmp_path / "out" / "manifest.json").exists()
    assert prepared(given, tmp_path / "out", **options) == undisturbed
    assert begun == first
    assert files(tmp_path / "out") == files(tmp_path / "undisturbed")


def test_a_begun_data_set_goes_on_only_as_it_was_left(tmp_path: Path, told: Told) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(20))
    with killed("close"):
        prepared([source], tmp_path / "out")
    told(refused([source], tmp_path / "out", val_fraction=0.5), tmp_path)
    shard, victim = tmp_path / "out" / "train-00000.bin", tmp_path / "victim"
    shard.write_bytes(b"")
    told(refused([source], tmp_path / "out"), tmp_path)
    victim.write_text("precious" * 10_000)
    shard.unlink()
    shard.symlink_to(victim)
    told(refused([source], tmp_path / "out"), tmp_path)
    assert victim.read_text() == "precious" * 10_000


def test_what_lies_in_the_folder_leads_to_no_file_outside_and_does_not_stay(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(20))
    (victim := tmp_path / "victim").write_text("precious")
    (out := tmp_path / "out").mkdir()
    (out / "train-00000.bin").symlink_to(victim)
    for name in ("manifest.json", "progress.json", "sources.json"):
        (out / f".{name}.123").touch()
        os.mkfifo(out / name)
        assert refused([source], out).startswith(f"--out={out}/{name} is not a regular file")
        (out / name).unlink()
    dataset = prepared([source], out)
    assert victim.read_text() == "precious"
    assert sorted(files(out)) == ["manifest.json", "sources.json", *(shard.name for shard in dataset.shards)]
    assert not any(path.is_symlink() for path in out.iterdir())


def test_a_data_set_that_has_lost_a_shard_is_made_again(tmp_path: Path) -> None:
    source, out = write_jsonl(tmp_path / "a.jsonl", some_texts(20)), tmp_path / "out"
    first = prepared([source], out)
    before, shard = files(out), out / first.shards[0].name
    for left in (None, b""):
        shard.unlink()
        if left is not None:
            shard.write_bytes(left)
        assert prepared([source], out) == first
        assert files(out) == before


def test_a_source_that_changed_under_its_name_and_size_is_noticed(tmp_path: Path, told: Told) -> None:
    for folder in ("a", "copy", "other"):
        (tmp_path / folder).mkdir()
    source = write_jsonl(tmp_path / "a/a.jsonl", ["king"])
    out = tmp_path / "out"
    first = prepared([source], out)
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    assert prepared([source], out) == first
    assert prepared([write_jsonl(tmp_path / "copy/a.jsonl", ["king"])], out) == first
    told(refused([write_jsonl(tmp_path / "other/a.jsonl", ["kine"])], out), tmp_path)
    told(refused([write_jsonl(source, ["wing"])], out), tmp_path)
    assert refused([source], out, most=1).startswith("--out=")
    assert {p.name: p.stat().st_mtime_ns for p in out.iterdir()} == before


def test_a_store_that_tells_no_versions_has_its_sources_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "VERSION_KEYS", ())
    with web_kit.served(tmp_path) as url:
        write_jsonl(tmp_path / "a.jsonl", ["king"])
        first = prepared([f"{url}/a.jsonl"], tmp_path / "out")
        assert prepared([f"{url}/a.jsonl"], tmp_path / "out") == first
        write_jsonl(tmp_path / "a.jsonl", ["wing"])
        refused([f"{url}/a.jsonl"], tmp_path / "out")


# --- addresses ---


def test_a_signature_in_an_address_is_no_part_of_the_name_and_never_shown(tmp_path: Path, capsys: Captured) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts := some_texts(20))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(texts).encode()))
    with web_kit.served(tmp_path) as url:
        first, again = (
            prepared([f"{url}/{name}?X-Signature={given}" for name in ("a.jsonl", "b.jsonl.gz")], tmp_path / "out")
            for given in ("s3cret*[1]", "another")
        )
        # The same files by another password: what is finished stays, and no hash of a password is stored.
        stored = (tmp_path / "out/sources.json").read_bytes()
        for password in ("s3cret", "another"):
            prepared(
                [f"{url.replace('://', f'://me:{password}@')}/{name}" for name in ("a.jsonl", "b.jsonl.gz")],
                tmp_path / "out",
            )
            assert (tmp_path / "out/sources.json").read_bytes() == stored
        assert cli.run("prepare", [f"{url}/a.doc?X-Signature=s3cret", *into(tmp_path)]) == 64
    assert again == first
    assert row(tmp_path / "out", first, "train") == 2 * expected(texts, 0, "train")
    out, err = capsys.readouterr()
    assert f"SOURCES={url}/a.doc?***: " in err
    assert "s3cret" not in out + err
    assert identity_of(f"{url}/download?id=1") != identity_of(f"{url}/download?id=2")  # a query that is no signature


# --- lists of sources ---


@pytest.mark.parametrize("line", [b"--out=elsewhere", b"\xff", None])
def test_a_list_of_somebody_else_sets_no_option(tmp_path: Path, line: bytes | None) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be")
    if line is not None:
        (tmp_path / "list").write_bytes(f"{tmp_path}/a.txt\n".encode() + line)
    try:
        code: object = cli.run("prepare", [*into(tmp_path), f"@{tmp_path}/list"])
    except SystemExit as end:
        code = end.code
    assert code == 64
    assert not (tmp_path / "out").exists()


def test_a_byte_order_mark_is_no_part_of_a_text_or_a_list(tmp_path: Path) -> None:
    made = []
    for mark in ("", "\ufeff"):
        (tmp_path / "a.txt").write_text(f"{mark}the king")
        (tmp_path / "b.jsonl").write_text(mark + jsonl(["woe", "king"]))
        (tmp_path / "c.csv").write_text(f"{mark}text,id\nlong,1\n")
        (tmp_path / "list").write_text(f"{mark}{tmp_path}/a.txt\n{tmp_path}/b.jsonl\n{tmp_path}/c.csv\n")
        words = ["--out", str(tmp_path / f"out{mark}"), "--val-fraction=0", f"@{tmp_path}/list"]
        assert cli.run("prepare", [*into(tmp_path), *words]) == 0
        made.append((tmp_path / f"out{mark}" / "train-00000.bin").read_bytes())
    assert made[0] == made[1]


def test_a_separator_that_occurs_nowhere_is_told_with_the_line_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content, told in (
        ("a", "the\r\n\r\nking\r\n", True),
        ("b", "the\n\nking", False),
        ("c", "the\n\n", False),
    ):
        (source := tmp_path / f"{name}.txt").write_bytes(content.encode())
        prepared([source], tmp_path / name, separator="\n\n", val_fraction=0)
        out = capsys.readouterr().out
        assert (f"{source}: --separator '\\n\\n' is not in it, its lines end in '\\r\\n'" in out) == told
    prepared([tmp_path / "a.txt"], tmp_path / "none", val_fraction=0)
    assert "--separator" not in capsys.readouterr().out


# --- mistakes ---


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"\n', " line 3: cannot be read"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', " line 2: cannot be read (no strings in the field 'text';"),
        ("a.jsonl", b'{"messages": []}\n', "conversations need no shards: train on them with data=chat"),
        ("a.jsonl", b'{"instruction": "a", "output": "b"}\n', "train on them with data=chat data.path=…"),
        ("a.jsonl", b'{"text": "\xff"}', " line 1: "),
        ("a.jsonl", b"[" * 100_000, " line 1: "),
        ("a.csv", b'text,id\n"a\nb",1\nb,2,3\n', ": cannot be read as csv (CSV parse error: Row #3: Expected 2 col"),
        ("a.csv", b"body,id\na,1\n", ": cannot be read as csv (no column 'text')"),
        ("a.csv.gz", gzip.compress(b"text\n\xff\n", mtime=0), ": cannot be read as csv (In CSV column #0: Row #2"),
        ("a.jsonl.xz", b"", ": unknown form .xz"),
        ("a.txt", "größer".encode() + b"\xff", ": cannot be read as text ('utf-8' codec can't decode byte"),
        ("a.txt.gz", gzip.compress(b"the king" * 99, mtime=0)[:-9], ": cannot be read as text"),
        ("a.parquet", b"no parquet", ": cannot be read as parquet"),
        ("a.parquet", table(text=pyarrow.array([b"\xff\xfe"]).view(pyarrow.string())), ": cannot be read as parquet"),
        ("a.parquet", table(text=some_texts(300)).replace(b"the", b"\xff\xff\xff"), ": cannot be read as parquet"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error_and_exit_64(
    tmp_path: Path, capsys: Captured, name: str, content: bytes, place: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert cli.run("prepare", [str(tmp_path / name), *into(tmp_path)]) == 64
    err = capsys.readouterr().err
    assert (err[:7], err.count("\n")) == ("error: ", 1)
    assert (f"{name}{place}" if place[0] in " :" else place) in err
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    "arguments",
    ["no.txt", "no-*.txt", ".", "x --val-fraction 1 --processes 0", "x --tokenizer nowhere", "x --tokens=10G"],
)
def test_bad_arguments_exit_64(tmp_path: Path, capsys: Captured, arguments: str, told: Told) -> None:
    assert cli.run("prepare", [*into(tmp_path), *arguments.split()]) == 64
    told(capsys.readouterr().err, tmp_path)


# --- --tokens N ---


@pytest.mark.parametrize("form", ["jsonl", "txt"])
@pytest.mark.parametrize("read", [3, 60, 1 << 20])  # bytes: the middle of a character; a document or so; all of a file
def test_it_ends_with_the_document_that_makes_it_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, read: int
) -> None:
    monkeypatch.setattr(documents, "READ", read)
    monkeypatch.setattr(bpe, "PIECE", 64)  # and documents of several pieces
    texts = some_texts(40)
    sources = [tmp_path / f"{i}.{form}" for i in range(2)]
    for source, part in zip(sources, (texts[:25], texts[25:]), strict=True):
        write_jsonl(source, part) if form == "jsonl" else source.write_text("=-=".join([*part, ""]))
    ends = [len(expected(texts[: i + 1], 0, "train")) for i in range(40)]
    for most in (1, ends[0], ends[0] + 1, ends[24], ends[24] + 1, ends[-1] - 1):
        out = tmp_path / str(most)
        dataset = prepared(sources, out, separator="=-=", val_fraction=0.2, most=most, shard_tokens=37)
        count = 1 + sum(end < most for end in ends)  # the documents that belong there
        assert sum(shard.documents for shard in dataset.shards) == count
        for split in ("train", "validation"):
            assert row(out, dataset, split) == expected(texts[:count], 0.2, split)


def test_files_beyond_are_not_read_and_fewer_than_asked_for_are_noted(
    tmp_path: Path, capsys: Captured, told: Told
) -> None:
    sources = [write_jsonl(tmp_path / f"{i}.jsonl", some_texts(20, seed=i)) for i in range(2)]
    (bad := tmp_path / "2.jsonl").write_text("no JSON")
    prepared([*sources, bad], tmp_path / "out", most=2000)
    prepared(sources, tmp_path / "all", most=1_000_000)
    told(capsys.readouterr().out)


def test_numbers_are_written_as_people_write_them() -> None:
    written = {"10B": 10**10, "1.5k": 1500, "1_000_000": 10**6}
    assert {text: token_count(text) for text in written} == written
    for text in ("-1", "0", "0.1", "B", "1e9"):
        with pytest.raises(ValueError):  # noqa: PT011
            token_count(text)
