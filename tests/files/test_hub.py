"""hf:// as a source of `mingpt prepare`: Hugging Face's own client, against a hub on loopback."""

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from mingpt.cli import cli
from mingpt.cli.redact import redacted
from mingpt.errors import TransientError, UserError
from tests.kits import hub_kit
from tests.kits.hub_kit import Hub, Repository
from tests.kits.prepare_kit import files, into, jsonl, killed, prepared, some_texts
from tests.kits.told import Told

DATA = "hf://datasets/me/data"
TOKEN = "a-token-that-nobody-may-see"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with hub_kit.hub(tmp_path / "hf") as started:
        started.repositories["me/data"] = Repository()
        yield started


def encoded(texts: list[str]) -> bytes:
    return jsonl(texts).encode()


def table(texts: list[str]) -> bytes:
    parquet.write_table(pyarrow.table({"text": texts}), stream := io.BytesIO())
    return stream.getvalue()


@pytest.mark.parametrize(("form", "content"), [("jsonl", encoded), ("parquet", table)])
def test_a_dataset_of_the_hub_is_prepared_as_the_same_files_here(
    tmp_path: Path, hub: Hub, form: str, content: Callable[[list[str]], bytes]
) -> None:
    (here := tmp_path / "sample").mkdir()
    for i in range(3):
        (here / f"{i}.{form}").write_bytes(content(some_texts(20, seed=i)))
    there = {f"sample/{name}": raw for name, raw in files(here).items()}
    commit = hub.repositories["me/data"].commit({"sample/more/9": b"9", **there})
    first = prepared([f"{DATA}/sample/*.{form}"], tmp_path / "there")
    assert first == prepared([f"{here}/*.{form}"], tmp_path / "here")
    ours, theirs = files(tmp_path / "here"), files(tmp_path / "there")
    assert json.loads(theirs.pop("sources.json"))["commits"] == {DATA: commit}
    assert ours.pop("sources.json")
    assert ours == theirs
    assert {*hub.read} == {f"{commit}/{name}" for name in there}
    assert [asked for asked in hub.strange if "agent" not in asked] == []  # no other way to download


def test_a_data_set_goes_on_with_the_commit_that_it_began_with_and_stays_there(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mingpt.prepare.prepare.RECORD_SECONDS", 0)
    repository, given = hub.repositories["me/data"], [f"{DATA}/*.jsonl"]
    old = repository.commit({f"{i}.jsonl": encoded(some_texts(20, seed=i)) for i in range(4)})
    undisturbed = prepared(given, tmp_path / "undisturbed", most=4000)
    with killed("add", 30):
        prepared(given, tmp_path / "out", most=4000)
    new = repository.commit({f"{i}.jsonl": encoded(some_texts(20, seed=99)) for i in range(4)})
    hub.read.clear()
    assert prepared(given, tmp_path / "out", most=4000) == undisturbed
    assert files(tmp_path / "out") == files(tmp_path / "undisturbed")
    assert {*hub.read} == {f"{old}/1.jsonl", f"{old}/2.jsonl"}  # 0 was finished, and 3 lies beyond `most`
    assert prepared([f"{DATA}@{old}/*.jsonl"], tmp_path / "named", most=4000) == undisturbed
    assert prepared([f"{DATA}@main/*.jsonl"], tmp_path / "newer", most=4000) != undisturbed
    with pytest.raises(UserError, match=r"^--out="):
        prepared([f"{DATA}@{new}/*.jsonl"], tmp_path / "out", most=4000)


def test_a_private_dataset_needs_a_token_which_nobody_sees(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["me/data"] = Repository(token=TOKEN)
    hub.repositories["me/data"].commit({"a.jsonl": encoded([f"{i} the king" for i in range(20)])})
    said = ""
    for token, code in (("", 64), (f"{TOKEN}-of-another", 64), (TOKEN, 0)):
        monkeypatch.setenv("HF_TOKEN", token)
        assert cli.run("prepare", [f"{DATA}/*.jsonl", *into(tmp_path)]) == code
        out, err = capsys.readouterr()
        assert ("HF_TOKEN" in err) is (code == 64)
        said += out + err
    assert hub.carried == []  # the CDN did not get it
    assert not [name for name, content in files(tmp_path / "out").items() if TOKEN.encode() in content]
    assert TOKEN not in said


@pytest.mark.parametrize(
    "source",
    [
        "hf://datasets/me/dat/a.jsonl",
        f"{DATA}@nowhere/a.jsonl",
        f"{DATA}/b.jsonl",
        f"{DATA}/b*.jsonl",
        f"{DATA}/folder",
        "hf://datasets/me/gated/*.jsonl",
    ],
)
def test_a_wrong_address_is_a_clear_mistake(tmp_path: Path, hub: Hub, source: str, told: Told) -> None:
    commit = hub.repositories["me/data"].commit({"a.jsonl": b"{}", "folder/a.jsonl": b"{}"})
    hub.repositories["me/gated"] = Repository(gated=True)
    with told.mistake(commit):
        prepared([source], tmp_path / "out")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz"])
def test_a_hub_that_fails_is_no_damaged_file(tmp_path: Path, hub: Hub, name: str) -> None:
    hub.repositories["me/data"].commit({name: table(some_texts(20))})
    hub.failing = 409  # an answer that the client does not ask for again
    with pytest.raises(TransientError, match=r"409 Conflict") as error:
        prepared([f"{DATA}/{name}"], tmp_path / "out")
    assert "s3cret" not in redacted(str(error.value))  # as the console prints it


@pytest.mark.slow
def test_a_process_of_its_own_tells_the_hub_nothing_of_itself(tmp_path: Path, hub: Hub) -> None:
    """Telemetry begins when the client is imported."""
    hub.repositories["me/data"].commit({"a.jsonl": encoded(some_texts(20))})
    command = [sys.executable, "-m", "mingpt", "prepare", f"{DATA}/*.jsonl", *into(tmp_path)]
    subprocess.run(command, check=True, timeout=600)
    assert hub.strange == []


@pytest.mark.slow
@pytest.mark.nightly
def test_a_hub_that_does_not_answer_is_not_waited_for_for_ever(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client waits for a listing without a limit of its own; between its tries it waits for 24 s in all."""
    hub.repositories["me/data"].commit({"folder/a.jsonl": b"{}"})
    monkeypatch.setenv("MINGPT_STORE_SECONDS", "1.2")
    hub.listing.clear()
    with pytest.raises(TransientError, match="timed out"):
        prepared([f"{DATA}/folder/*.jsonl"], tmp_path / "out")
