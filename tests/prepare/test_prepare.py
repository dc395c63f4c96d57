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
import pyarrow
import pytest
from pyarrow import parquet

import web_kit
from mingpt.data import bpe
from mingpt.data.dataset import from_bytes, tokens_in
from mingpt.errors import UserError
from mingpt.prepare import documents, sources
from mingpt.prepare.documents import Options
from mingpt.prepare.prepare import main, parser, progress
from mingpt.prepare.sources import File
from prepare_kit import VOCABULARY, expected, files, into, killed, prepared, row, some_texts, write_jsonl
from told import Told


def refused(*arguments: object, **options: object) -> str:
    with pytest.raises(UserError) as mistake:
        prepared(*arguments, **options)  # type: ignore[arg-type]
    return str(mistake.value)


# --- what comes out ---


@pytest.mark.parametrize("shard_tokens", [7, 1 << 25])
def test_every_document_is_there_once_in_order_followed_by_its_end(tmp_path: Path, shard_tokens: int) -> None:
    texts = some_texts(60)
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    dataset = prepared([source], tmp_path / "out", val_fraction=0.2, shard_tokens=shard_tokens)
    for split in ("train", "validation"):
        assert row(tmp_path / "out", dataset, split) == expected(texts, 0.2, split)
    assert 0 < sum(s.documents for s in dataset.of("validation")) < 60
    assert sum(s.documents for s in dataset.shards) == 60
    assert all(s.tokens == shard_tokens for s in dataset.of("train")[:-1])
    assert dataset.tokenizer == VOCABULARY.to_json()
    content = files(tmp_path / "out")
    assert from_bytes(content.pop("manifest.json"), "x") == dataset
    assert json.loads(content.pop("sources.json"))["made_from"] == dataset.made_from
    assert {n: sha256(c).hexdigest() for n, c in content.items()} == {s.name: s.sha256 for s in dataset.shards}
    assert sum(map(len, content.values())) == 2 * tokens_in(dataset.shards)


def table(**columns: object) -> bytes:
    parquet.write_table(pyarrow.table(columns), stream := io.BytesIO(), row_group_size=7)
    return stream.getvalue()


def test_every_form_gives_the_same_tokens(tmp_path: Path) -> None:
    texts = [t.replace("\n\n", "\n") for t in some_texts(50)]
    lines, plain = write_jsonl(tmp_path / "a", texts, "content").read_bytes(), "\n\n".join(texts).encode()
    csv.writer(rows := io.StringIO()).writerows([["id", "content"], *enumerate(texts)])
    shards = []
    for name, content in {
        "a.jsonl": lines,
        "a.txt": plain,
        "a.parquet": table(content=[*texts, None]),
        "a.jsonl.gz": gzip.compress(lines),
        "b.txt.bz2": bz2.compress(plain),
        "a.csv": rows.getvalue().encode(),
        "c.csv.zst": pyarrow.compress(rows.getvalue().encode(), "zstd", asbytes=True),
    }.items():
        (tmp_path / name).write_bytes(content)
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
    assert row(tmp_path / "whole", whole, "train") == expected([*texts[:20], long, *texts[20:]], 0, "train")
    for read, piece in ((5, 1 << 20), (3, 64), (1000, 64)):
        monkeypatch.setattr(documents, "READ", read)
        monkeypatch.setattr(bpe, "PIECE", piece)
        cut = prepared([tmp_path / "a.txt"], tmp_path / f"{read}-{piece}", separator="=-=", val_fraction=0.0)
        assert cut.shards == whole.shards


BAD_LINES = {2: "{", 5: "null", 6: '{"text": null}', 9: '{"body": "b"}', 12: '{"text": "a"'}


def write_with_bad_lines(path: Path, texts: Sequence[str]) -> Path:
    lines = [json.dumps({"text": text}) for text in texts]
    for number, line in BAD_LINES.items():
        lines.insert(number - 1, line)
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["0k", "3_000"])
def test_the_number_of_processes_changes_no_byte_and_no_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tokens: str
) -> None:
    monkeypatch.setattr(documents, "READ", 2000)
    for i in range(4):
        write_with_bad_lines(tmp_path / f"{i}.jsonl", some_texts(60, seed=i))
    how = [f"{tmp_path}/*.jsonl", "--shard-tokens=500", *([f"--tokens={tokens}"] if tokens != "0k" else [])]
    said = set()
    for processes in ("1", "3"):
        assert (
            main([*how, *into(tmp_path, "--skip-bad=20", "--processes", processes, f"--out={tmp_path}/{processes}")])
            == 0
        )
        capsys.readouterr()
        assert main([*how, *into(tmp_path, "--skip-bad=3", "--processes", processes)]) == 64
        said.add(capsys.readouterr().err)
    assert len(said) == 1
    assert "0.jsonl line 9: " in said.pop()
    assert files(tmp_path / "1") == files(tmp_path / "3")


def test_any_url_will_do_for_both_ends(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    texts = some_texts(30)
    memory.pipe_file("/corpus/a.jsonl", write_jsonl(tmp_path / "a.jsonl", texts).read_bytes())
    try:
        there = prepared(["memory://corpus/*.jsonl"], "memory://corpus/out", val_fraction=0.1, shard_tokens=50)
        assert there == prepared([tmp_path / "a.jsonl"], tmp_path / "out", val_fraction=0.1, shard_tokens=50)
        content = {n.rpartition("/")[2]: memory.cat_file(n) for n in memory.ls("/corpus/out", detail=False)}
        ours = files(tmp_path / "out")
        assert content.pop("sources.json") != ours.pop("sources.json")  # other versions of the same content
        assert content == ours
    finally:
        memory.rm("/corpus", recursive=True)


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

    def watched(files: Sequence[File], options: Options, bad: documents.Bad, first: int) -> Iterator[documents.Block]:
        begun.append(first)
        return real(files, options, bad, first)

    monkeypatch.setattr("mingpt.prepare.prepare.blocks", watched)
    for method, calls in (("add", 70), ("add", 10), ("add", 50), ("put", 0)):  # put: the manifest
        with killed(method, calls):
            prepared(given, tmp_path / "out", **options)
        assert not (tmp_path / "out" / "manifest.json").exists()
    assert prepared(given, tmp_path / "out", **options) == undisturbed
    assert begun == first
    assert files(tmp_path / "out") == files(tmp_path / "undisturbed")


@pytest.mark.slow
def test_sigkill_in_the_middle_changes_no_byte(tmp_path: Path) -> None:
    for i in range(40):
        write_jsonl(tmp_path / f"{i:02d}.jsonl", some_texts(400, seed=i))

    def command(out: str) -> list[str]:
        how = into(tmp_path, "--shard-tokens", "5000", "--processes", "2", "--out", f"{tmp_path}/{out}")
        return [sys.executable, "-m", "mingpt.data.prepare", f"{tmp_path}/*.jsonl", *how]

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
    (victim := tmp_path / "victim").write_text("precious")
    (out := tmp_path / "out").mkdir()
    for name in ("train-00000.bin", "sources.json"):
        (out / name).symlink_to(victim)
    for name in (".manifest.json.123", ".progress.json.123", ".sources.json.123"):
        (out / name).touch()
    dataset = prepared([write_jsonl(tmp_path / "a.jsonl", some_texts(20))], out)
    assert victim.read_text() == "precious"
    assert sorted(files(out)) == ["manifest.json", "sources.json", *(shard.name for shard in dataset.shards)]
    assert not any(path.is_symlink() for path in out.iterdir())


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-2])])
def test_a_data_set_that_has_lost_a_shard_is_made_again(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(20))
    first = prepared([source], tmp_path / "out", shard_tokens=100)
    before = files(tmp_path / "out")
    spoil(tmp_path / "out" / first.shards[1].name)
    assert prepared([source], tmp_path / "out", shard_tokens=100) == first
    assert files(tmp_path / "out") == before


@pytest.mark.parametrize("form", ["jsonl", "txt.gz", "parquet"])
def test_a_source_that_changed_under_its_name_and_size_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], told: Told, form: str
) -> None:
    def write(folder: str, word: str) -> Path:
        path = tmp_path / folder / f"a.{form}"
        path.parent.mkdir(exist_ok=True)
        packed = gzip.compress(word.encode(), compresslevel=0, mtime=0)
        contents = {"jsonl": f'{{"text": "{word}"}}'.encode(), "txt.gz": packed, "parquet": table(text=[word])}
        path.write_bytes(contents[form])
        return path

    source = write("a", "king")
    first = prepared([source], tmp_path / "out")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    size = source.stat().st_size
    assert prepared([source], tmp_path / "out") == first
    assert prepared([write("copy", "king")], tmp_path / "out") == first  # of equal content
    told(capsys.readouterr().out, tmp_path)
    for other in (write("other", "kine"), write("a", "wing")):
        assert other.stat().st_size == size
        told(refused([other], tmp_path / "out"), tmp_path)
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()} == before


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
        refused([f"{url}/a.jsonl"], tmp_path / "out")


# --- addresses ---


def test_a_signature_in_an_address_is_no_part_of_the_name_and_never_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts := some_texts(20))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes(), mtime=0))
    (tmp_path / "a.doc").write_text("the king")
    with web_kit.served(tmp_path) as url:
        signed = [f"{url}/{name}?X-Signature=s3cret*[1]" for name in ("a.jsonl", "b.jsonl.gz")]
        dataset = prepared(signed, tmp_path / "out", processes=1)
        again = [f"{url}/{name}?X-Signature=another" for name in ("a.jsonl", "b.jsonl.gz")]
        assert prepared(again, tmp_path / "out", processes=1) == dataset
        assert main([f"{url}/a.doc?X-Signature=s3cret", *into(tmp_path)]) == 64
    assert row(tmp_path / "out", dataset, "train") == 2 * expected(texts, 0, "train")
    out, err = capsys.readouterr()
    assert f"SOURCES={url}/a.doc?***: " in err
    assert "s3cret" not in out + err


def test_an_address_without_a_files_name_is_told_apart_by_its_query(tmp_path: Path) -> None:
    (tmp_path / "download").write_text("the king")
    with web_kit.served(tmp_path) as url:  # it gives the same for any query: only the addresses differ
        prepared([f"{url}/download?id=1"], tmp_path / "out", form="text", processes=1)
        refused([f"{url}/download?id=2"], tmp_path / "out", form="text", processes=1)


def test_a_server_that_cannot_be_reached_is_no_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with web_kit.served(tmp_path) as url:
        pass
    assert main([f"{url}/a.txt", *into(tmp_path)]) == 70
    assert f"SOURCES={url}/a.txt: " in capsys.readouterr().err


# --- lists of sources ---


def test_a_list_names_its_lines(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("b.jsonl\nhttps://host/a.jsonl\n")
    given = parser().parse_args(["x", f"@{tmp_path}/list", "y", "--out=o", "--tokenizer=t"])
    assert given.sources == ["x", "b.jsonl", "https://host/a.jsonl", "y"]


@pytest.mark.parametrize("line", [b"--out=elsewhere", b"\xff", None])
def test_a_list_of_somebody_else_sets_no_option(tmp_path: Path, line: bytes | None) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be")
    if line:
        (tmp_path / "list").write_bytes(f"{tmp_path}/a.txt\n".encode() + line + b"\n")
    try:
        code = main([*into(tmp_path), f"@{tmp_path}/list"])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 64
    assert not (tmp_path / "out").exists()


# --- mistakes ---


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"\n', " line 3: cannot be read"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', " line 2: cannot be read (no strings in the field 'text';"),
        ("a.jsonl", b'{"text": "a"}\n[1]', " line 2: "),
        ("a.jsonl", b'{"text": 5}', " line 1: "),
        ("a.jsonl", b'{"text": "\xff"}', " line 1: "),
        ("a.jsonl", b"[" * 100_000, " line 1: "),
        ("a.txt", "größer".encode() + b"\xff", ": cannot be read as text ('utf-8' codec can't decode byte"),
        ("a.txt", "größer".encode()[:3], ": cannot be read as text"),
        ("a.txt", b"", "SOURCES hold no text"),
        ("a.txt.gz", b"no gzip", ": cannot be read as text"),
        ("a.txt.gz", gzip.compress(b"the king" * 99, mtime=0)[:-9], ": cannot be read as text"),
        ("a.parquet", b"no parquet", ": cannot be read as parquet"),
        ("a.parquet", table(text=[1], body=["a"]), "no strings in the field 'text'; there are 'text', 'body'"),
        ("a.parquet", table(text=pyarrow.array([b"\xff\xfe"]).view(pyarrow.string())), ": cannot be read as parquet"),
        ("a.parquet", table(text=some_texts(300)).replace(b"the", b"\xff\xff\xff"), ": cannot be read as parquet"),
        ("a.doc", b"the king", ": unknown form .doc"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error_and_exit_64(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, place: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main([str(tmp_path / name), *into(tmp_path)]) == 64
    err = capsys.readouterr().err
    assert (err[:7], err.count("\n")) == ("error: ", 1)
    assert (f"{name}{place}" if place[0] in " :" else place) in err
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_bad_lines_are_left_out_counted_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = some_texts(20)
    source = write_with_bad_lines(tmp_path / "a.jsonl", texts)
    dataset = prepared([source], tmp_path / "out", skip_bad=5)
    assert row(tmp_path / "out", dataset, "train") == expected(texts, 0, "train")
    assert re.findall(r"jsonl line (\d+): ", capsys.readouterr().out) == [*map(str, BAD_LINES)]
    assert "a.jsonl line 12: " in refused([source], tmp_path / "four", skip_bad=4)
    assert "a.jsonl line 2: " in refused([source], tmp_path / "none")


def test_bad_lines_of_finished_files_count_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingpt.prepare.prepare.RECORD_SECONDS", 0)
    given = [write_with_bad_lines(tmp_path / f"{i}.jsonl", some_texts(20, seed=i)) for i in range(3)]
    undisturbed = prepared(given, tmp_path / "undisturbed", skip_bad=15)
    assert "2.jsonl line 9: " in refused(given, tmp_path / "out", skip_bad=13)
    assert json.loads((tmp_path / "out" / "progress.json").read_text())["done"]["files"] == 2
    assert "2.jsonl line 12: " in refused(given, tmp_path / "out", skip_bad=14)
    assert prepared(given, tmp_path / "out", skip_bad=15) == undisturbed
    assert files(tmp_path / "out") == files(tmp_path / "undisturbed")


def test_a_files_name_and_content_move_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a\x1b[2J\nerror: no.jsonl").write_text('{"\\u001b]0;x\\u0007\\n": 1}\n{"text": "a"}\n')
    how = into(tmp_path, "--val-fraction", "0")
    assert main([f"{tmp_path}/a*.jsonl", *how]) == 64
    assert main([f"{tmp_path}/a*.jsonl", *how, "--skip-bad", "1"]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert err.count("\n") == 1
    assert f"{tmp_path}/a\\x1b[2J\\nerror: no.jsonl line 1: " in err


@pytest.mark.parametrize(
    "arguments",
    [
        "no.txt",
        "no-*.txt",
        ".",
        "x --val-fraction 1 --processes 0",
        "x --tokenizer nowhere",
        *(f"x --tokens={number}" for number in ("10G", "-1", "0", "0.1", "B", "1e9")),
    ],
)
def test_bad_arguments_exit_64(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, told: Told) -> None:
    assert main([*into(tmp_path), *arguments.split()]) == 64
    told(capsys.readouterr().err, tmp_path)


def test_what_a_log_gets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    (tmp_path / "a.txt").write_text("the king")
    assert main([str(tmp_path / "a.txt"), *into(tmp_path)]) == 0
    monkeypatch.setattr("mingpt.prepare.prepare.LOG_SECONDS", 0)
    progress()(0.25, 1234)
    told(capsys.readouterr().out, tmp_path)
