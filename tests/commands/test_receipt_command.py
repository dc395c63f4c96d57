"""`mingpt receipt`: the chain is as the run is; a receipt or a run that somebody has changed is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mingpt.commands.receipt import receipt_command
from mingpt.report.receipt import decode, encode
from mingpt.snapshot.store import Store
from replay_kit import files_of, train_here
from rewriting_kit import rewrite

Captured = pytest.CaptureFixture[str]
DATA = ("data=sort", "data.val_samples=37", "snapshot.every_steps=3", "snapshot.keep=9")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two attempts, and snapshots at 3, 5 and 6."""
    folder = tmp_path_factory.mktemp("told") / "run"
    for last in (5, 6):
        train_here(str(folder), *DATA, f"train.max_steps={last}")
    return folder


@pytest.fixture
def receipt(run: Path, tmp_path: Path, capsys: Captured) -> Path:
    assert receipt_command([str(run)]) == 0
    path = tmp_path / "receipt.json"
    path.write_text(capsys.readouterr().out)
    return path


def test_what_it_says(run: Path, receipt: Path, capsys: Captured) -> None:
    before = files_of(run)
    entries = json.loads(receipt.read_text())["entries"]
    told = [(e["what"], e.get("step", e.get("attempt"))) for e in entries]
    assert told == [
        ("code", None), ("attempt", 1), ("trace", 1), ("snapshot", 3), ("snapshot", 5),
        ("attempt", 2), ("trace", 2), ("snapshot", 6),
    ]  # fmt: skip
    assert entries[1]["config"]["train"]["max_steps"] == 5
    assert entries[1]["data_sha256"] == entries[1]["fingerprint"]["data"]
    assert [e["records"] for e in entries if e["what"] == "trace"] == [5, 1]
    assert [b["before"] for b in entries[1:]] == [a["hash"] for a in entries[:-1]]
    assert receipt_command(["--verify", str(receipt), str(run), "--sample", "2"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "the chain holds, and its 8 entries are as in the run"
    assert [line[:2] for line in out[1:3]] == ["ok", "ok"]
    assert out[3].endswith(": all right")
    assert files_of(run) == before


def test_each_byte_counts(run: Path, receipt: Path, tmp_path: Path, capsys: Captured) -> None:
    """200 seeded bytes and the last one of the file, each changed alone."""
    raw, other = receipt.read_bytes().rstrip(), tmp_path / "other.json"
    chooser = Random(1)
    for at in [*chooser.sample(range(len(raw)), 200), len(raw) - 1]:
        other.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        assert receipt_command(["--verify", str(other), str(run), "--sample", "0"]) in (1, 64), at
    digest = json.loads(raw)["entries"][3]["digest"].encode()
    other.write_bytes(raw.replace(digest, digest[:-1] + (b"0" if digest[-1:] != b"0" else b"1")))
    capsys.readouterr()
    assert receipt_command(["--verify", str(other), str(run)]) == 1
    assert "entry 4 (snapshot 3) does not have its hash: the receipt was changed" in capsys.readouterr().err


def test_a_chain_made_anew_is_not_that_of_the_run(run: Path, receipt: Path, capsys: Captured) -> None:
    entries = decode(receipt.read_bytes())
    entries[4]["digest"] = "0" * 64
    entries[5]["config"]["optimizer"]["lr"] = 9.0
    receipt.write_text(encode(entries))
    assert receipt_command(["--verify", str(receipt), str(run)]) == 1
    told = capsys.readouterr().err
    assert (
        "the run is not as the receipt says:\nsnapshot 5: digest is another one\nattempt 2: config is another" in told
    )


Entries = list[dict[str, Any]]


def of_a_later_step(entries: Entries) -> Entries:
    entries[6]["last"] = 900
    return [*entries, {"what": "snapshot", "step": 900, "digest": "0" * 64}]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda e: [one for one in e if one["what"] != "snapshot"], "does not end with a snapshot"),
        (lambda e: [*e, {"what": "snapshot", "step": "6", "digest": ""}], "does not end with a snapshot"),
        (lambda e: [*e, {"what": "snapshot"}], "does not end with a snapshot"),
        (lambda e: [*e[:6], e[6] | {"last": 900}, e[7]], "does not end with a snapshot"),
        (of_a_later_step, "step 900: "),
        (lambda e: [*e, e[-1]], "its entries are in another order, or are there twice"),
        (lambda e: e[::-1], "its entries are in another order, or are there twice"),
        (
            lambda e: [e[0], e[1] | {"config": {**e[1]["config"], "data": 3}}, *e[2:]],
            "attempt 1: config is another one",
        ),
        (lambda e: [e[0], e[1] | {"config": None}, *e[2:]], "attempt 1: config is another one"),
    ],
)
def test_a_chain_that_tells_more_or_less_than_there_is(
    run: Path, receipt: Path, capsys: Captured, change: Callable[[Entries], Entries], told: str
) -> None:
    receipt.write_text(encode(change(decode(receipt.read_bytes()))))
    assert receipt_command(["--verify", str(receipt), str(run), "--sample", "1"]) == 1
    assert told in capsys.readouterr().err


def test_none_of_its_snapshots_is_kept_any_more(run: Path, receipt: Path, tmp_path: Path, capsys: Captured) -> None:
    longer = Path(shutil.copytree(run, tmp_path / "run"))
    train_here(str(longer), *DATA, "train.max_steps=9")
    for step in (3, 5, 6):
        shutil.rmtree(longer / f"snapshots/step-{step:09d}")
    assert receipt_command(["--verify", str(receipt), str(longer)]) == 0
    told = capsys.readouterr()
    other = [f"attempt {n}: config is another one, in keys that do not affect the result" for n in (1, 2)]
    gone = [f"snapshot {step}: the run no longer has it" for step in (3, 5, 6)]
    assert sorted(told.err.splitlines()) == other + gone  # train.max_steps is told by later snapshots
    assert "config and seed to 9" in told.out


def test_a_run_that_was_changed_before_its_receipt(run: Path, tmp_path: Path, capsys: Captured) -> None:
    """The receipt fits it; computing it again shows what it is."""
    changed = Path(shutil.copytree(run, tmp_path / "run"))
    rewrite(Store(f"{changed}/snapshots"), 3, lambda state: next(iter(state["model"].values())).mul_(2))
    assert receipt_command([str(changed)]) == 0
    (tmp_path / "r").write_text(capsys.readouterr().out)
    assert receipt_command(["--verify", f"{tmp_path}/r", str(changed), "--sample", "9"]) == 1
    told = capsys.readouterr()
    assert "FAIL    config and seed to 3: " in told.out
    assert "2 wrong, the first up to step 3 by attempt 1" in told.err


def test_a_run_that_has_gone_on(run: Path, receipt: Path, tmp_path: Path, capsys: Captured) -> None:
    longer = Path(shutil.copytree(run, tmp_path / "run"))
    train_here(str(longer), *DATA, "train.max_steps=9")
    shutil.rmtree(longer / "snapshots/step-000000003")
    assert receipt_command(["--verify", str(receipt), str(longer), "--sample", "9"]) == 0
    told = capsys.readouterr()
    assert told.err == "snapshot 3: the run no longer has it\n"
    assert "config and seed to 5" in told.out
    assert "2 intervals, 6 steps: all right" in told.out


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"receipt": 1, "entries": [7]}', b"\xff", b"[" * 9999])
def test_no_receipt(run: Path, tmp_path: Path, capsys: Captured, content: bytes) -> None:
    (tmp_path / "r").write_bytes(content)
    assert receipt_command(["--verify", f"{tmp_path}/r", str(run)]) == 1
    assert "this is no receipt, or it was changed" in capsys.readouterr().err
    assert receipt_command(["--verify", f"{tmp_path}/none", str(run)]) == 64
