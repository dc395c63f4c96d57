"""hf:// as a source of `mingpt prepare`: Hugging Face's own client, against a hub on loopback."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import bpe_kit
import hub_kit
from hub_kit import Hub, Repository
from mingpt.data.dataset import DataSet
from mingpt.errors import TransientError, UserError
from mingpt.prepare.documents import Options
from mingpt.prepare.prepare import main, prepare
from prepare_kit import files, jsonl, some_texts

pytest.importorskip("huggingface_hub")
pyarrow = pytest.importorskip("pyarrow")
VOCABULARY = bpe_kit.small()
DATA = "hf://datasets/me/data"
TOKEN = "a-token-that-nobody-may-see"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with hub_kit.hub(tmp_path / "hf") as started:
        started.repositories["me/data"] = Repository()
        yield started


def encoded(texts: list[str]) -> bytes:
    return jsonl(texts).encode()


def parquet(texts: list[str], **columns: list[bytes]) -> bytes:
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": texts, **columns}), stream := io.BytesIO(), compression="none")
    return stream.getvalue()


def prepared(source: str, out: Path, **options: int) -> DataSet:
    return prepare([source], str(out), VOCABULARY, Options(val_fraction=0.1), **options)  # type: ignore[arg-type]


def shards(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in files(folder).items() if name != "sources.json"}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_dataset_of_the_hub_is_prepared_as_the_same_files_here(tmp_path: Path, hub: Hub, form: str) -> None:
    (here := tmp_path / "sample").mkdir()
    for i in range(5):  # more than the hub lists at once
        (here / f"{i}.{form}").write_bytes(
            encoded(some_texts(20, seed=i)) if form == "jsonl" else parquet(some_texts(20, seed=i))
        )
    commit = hub.repositories["me/data"].commit({"README.md": b"#", "sample/more/9": b"9"} | of(here, "sample"))
    there = prepared(f"{DATA}/sample/*.{form}", tmp_path / "there", shard_tokens=100)
    assert there == prepared(f"{here}/*.{form}", tmp_path / "here", shard_tokens=100)
    assert shards(tmp_path / "there") == shards(tmp_path / "here")
    assert json.loads((tmp_path / "there/sources.json").read_text())["commits"] == {DATA: commit}
    assert [name.rpartition("/")[2] for name in dict.fromkeys(hub.read)] == [f"{i}.{form}" for i in range(5)]
    assert [asked for asked in hub.strange if "agent" not in asked] == []  # no other way to download


def of(folder: Path, below: str) -> dict[str, bytes]:
    return {f"{below}/{name}": content for name, content in files(folder).items()}


def test_columns_without_text_stay_there(tmp_path: Path, hub: Hub) -> None:
    photographs = [os.urandom(1 << 20) for _ in range(24)]
    content = parquet(some_texts(24), image=photographs)
    hub.repositories["me/data"].commit({"a.parquet": content})
    prepared(f"{DATA}/a.parquet", tmp_path / "out")
    assert hub.sent < len(content) / 2


@pytest.mark.slow
def test_sigkill_in_the_middle_goes_on_with_the_commit_that_it_began_with(tmp_path: Path, hub: Hub) -> None:
    repository = hub.repositories["me/data"]
    old = repository.commit({f"{i}.jsonl": encoded(some_texts(300, seed=i)) for i in range(6)})
    tokenizer = str(bpe_kit.write_gpt2(tmp_path / "gpt2"))

    def command(out: str) -> list[str]:
        rest = ["--tokenizer", tokenizer, "--shard-tokens", "5000", "--processes", "1", "--tokens", "80k"]
        return [sys.executable, "-m", "mingpt.data.prepare", f"{DATA}/*.jsonl", "--out", str(tmp_path / out), *rest]

    done = subprocess.run(command("undisturbed"), check=True, capture_output=True, text=True, timeout=600)
    assert "documents (--tokens 80,000), in file 4 of 6" in done.stdout, done.stdout
    assert hub.strange == []  # no telemetry, which a process of its own would begin with
    asked = [hub.hold(f"{i}.jsonl") for i in (1, 2)]
    process = subprocess.Popen(command("out"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert asked[0].wait(200)
    hub.held["1.jsonl"].wait(0.5)  # what is finished within a quarter of a second is not recorded alone
    hub.held["1.jsonl"].set()
    assert asked[1].wait(200)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=600)
    assert json.loads((tmp_path / "out/progress.json").read_text())["commits"] == {DATA: old}
    hub.release()
    hub.read.clear()
    new = repository.commit({f"{i}.jsonl": encoded(some_texts(300, seed=99)) for i in range(6)})
    again = subprocess.run(command("out"), check=True, capture_output=True, text=True, timeout=600)
    assert "prepare: going on after 2 of 6 files" in again.stdout, again.stdout
    assert files(tmp_path / "out") == files(tmp_path / "undisturbed")
    assert new != old
    assert {name.partition("/")[0] for name in hub.read} == {old}
    assert f"{old}/0.jsonl" not in hub.read  # was finished
    assert f"{old}/5.jsonl" not in hub.read  # lies beyond --tokens


def test_a_finished_data_set_stays_at_its_commit(tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    repository = hub.repositories["me/data"]
    old = repository.commit({"a.jsonl": encoded(some_texts(20))})
    first = prepared(f"{DATA}/*.jsonl", tmp_path / "out")
    new = repository.commit({"a.jsonl": encoded(some_texts(20, seed=2))})
    assert prepared(f"{DATA}/*.jsonl", tmp_path / "out") == first
    assert capsys.readouterr().out == f"prepare: --out={tmp_path}/out: already there, made of these sources\n"
    with pytest.raises(UserError, match="another data set is there"):
        prepared(f"{DATA}@{new}/*.jsonl", tmp_path / "out")
    assert prepared(f"{DATA}@{old}/*.jsonl", tmp_path / "named") == first
    assert prepared(f"{DATA}@main/*.jsonl", tmp_path / "newer") != first


def test_a_private_dataset_needs_a_token_which_nobody_sees(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["me/data"] = Repository(token=TOKEN)
    hub.repositories["me/data"].commit({"a.jsonl": encoded([f"{i} the king" for i in range(20)])})
    tokenizer = str(bpe_kit.write_gpt2(tmp_path / "gpt2"))
    command = [f"{DATA}/*.jsonl", "--out", str(tmp_path / "out"), "--tokenizer", tokenizer, "--processes", "1"]
    for wrong in ("", f"{TOKEN}-of-another"):
        monkeypatch.setenv("HF_TOKEN", wrong)
        assert main(command) == 64
        expected = "not there, or private: check the spelling, or set HF_TOKEN in the environment"
        assert capsys.readouterr().err == f"error: SOURCES={DATA}/*.jsonl: {expected}\n"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main(command) == 0
    assert hub.carried == []  # the CDN did not get it
    told = capsys.readouterr()
    assert not [name for name, content in files(tmp_path / "out").items() if TOKEN.encode() in content]
    assert TOKEN not in told.out + told.err


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("hf://datasets/me/dat/a.jsonl", "not there, or private: check the spelling, or set HF_TOKEN"),
        (f"{DATA}@nowhere/a.jsonl", "not there, or private: check the spelling, or set HF_TOKEN"),
        (f"{DATA}/b.jsonl", "there is no such file or bucket: check the spelling"),
        (f"{DATA}/b*.jsonl", "no file is there: check the spelling"),
        (f"{DATA}/folder", "a folder: name the files in it, as in hf://datasets/me/data@"),
        ("hf://datasets/me", "not hf://datasets/OWNER/NAME[@REVISION]/FILES: "),
        ("hf://", "not hf://datasets/OWNER/NAME[@REVISION]/FILES: "),
    ],
)
def test_a_wrong_address_is_a_clear_mistake(tmp_path: Path, hub: Hub, source: str, problem: str) -> None:
    hub.repositories["me/data"].commit({"a.jsonl": b"{}", "folder/a.jsonl": b"{}"})
    with pytest.raises(UserError) as error:
        prepared(source, tmp_path / "out")
    assert str(error.value).startswith(f"SOURCES={source}: {problem}")


def test_a_gated_dataset_says_what_opens_it(tmp_path: Path, hub: Hub) -> None:
    hub.repositories["me/data"].gated = True
    with pytest.raises(UserError, match=r"gated: accept its terms on its page, and set HF_TOKEN in the environment$"):
        prepared(f"{DATA}/*.jsonl", tmp_path / "out")


def test_without_the_client_the_error_says_how_to_install_it(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mingpt import hub as client

    client.set_up.cache_clear()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"^SOURCES=hf://datasets/me/data/a\.jsonl: .*: pip install -e '\.\[hf\]'"):
        prepared(f"{DATA}/a.jsonl", tmp_path / "out")


def test_a_hub_that_cannot_be_reached_is_no_mistake(tmp_path: Path) -> None:
    with hub_kit.hub(tmp_path / "hf"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{hub_kit.CONSTANTS}.ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(TransientError, match=r"Connection refused: try again"):
            prepared(f"{DATA}/a.jsonl", tmp_path / "out")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz"])
def test_a_hub_that_fails_is_no_damaged_file(tmp_path: Path, hub: Hub, name: str) -> None:
    hub.repositories["me/data"].commit({name: parquet(some_texts(20))})
    hub.failing = 409  # an answer that the client does not ask for again
    with pytest.raises(TransientError, match=r"409 Conflict.*: try again") as error:
        prepared(f"{DATA}/{name}", tmp_path / "out")
    assert "s3cret" not in str(error.value)


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_not_waited_for_for_ever(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client waits for a listing without a limit of its own; between its tries it waits for 24 s in all."""
    hub.repositories["me/data"].commit({"folder/a.jsonl": b"{}"})
    monkeypatch.setenv("MINGPT_STORE_SECONDS", "1.2")
    hub.hold("folder")
    with pytest.raises(TransientError, match="timed out"):
        prepared(f"{DATA}/folder/*.jsonl", tmp_path / "out")
