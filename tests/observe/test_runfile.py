"""A file of the run that grows, or is replaced: on a disk that fills up, in a bucket that is slow or gone."""

import threading
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from mingpt.observe import runfile
from mingpt.observe.runfile import RunFile


def test_a_disk_that_is_full_costs_nothing_and_no_run(tmp_path: Path) -> None:
    said: list[str] = []
    file, path = RunFile(str(tmp_path), "metrics/a.bin", said.append), tmp_path / "metrics/a.bin"
    file.append(b"one ")
    for more in (b"two ", b"three "):
        file._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        file.append(more)
    path.write_bytes(b"one tw")  # as a failed write may leave it
    assert [line.partition(": the disk is full")[0] for line in said] == [
        f"METRICS can't be written: run.dir={tmp_path}"
    ]
    file.append(b"four")  # there is space again
    assert said[1:] == ["metrics are written again"]
    file.close()
    assert path.read_bytes() == b"one two three four"


def test_a_file_that_is_replaced_is_whole_at_any_time(tmp_path: Path) -> None:
    said: list[str] = []
    file = RunFile(str(tmp_path), "ledger/a.json", said.append, "ledger", replaced=True)
    file.replace(b"first")
    file.flush()
    (tmp_path / "ledger/a.json").unlink()
    (tmp_path / "ledger").rmdir()
    (tmp_path / "ledger").write_text("in the way")
    file.replace(b"second")
    file.flush()
    (tmp_path / "ledger").unlink()
    file.replace(b"third")
    file.close()
    assert [line.partition(":")[0] for line in said] == ["LEDGER can't be written", "ledger is written again"]
    assert (tmp_path / "ledger/a.json").read_bytes() == b"third"
    assert [p.name for p in (tmp_path / "ledger").iterdir()] == ["a.json"]


def test_a_bucket_that_does_not_answer_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runfile, "LAST_SECONDS", 0.01)
    said, answer = list[str](), threading.Event()
    run_dir = f"memory://{uuid4().hex}"
    file = RunFile(run_dir, "a", said.append)
    monkeypatch.setattr(fsspec.filesystem("memory"), "pipe_file", lambda *_: answer.wait(200))
    try:
        file.append(b"one")
        file.close()
        assert said == [f"METRICS: run.dir={run_dir} does not answer: the newest may be missing there"]
    finally:
        answer.set()


@pytest.mark.parametrize("finished", [False, True])
def test_a_bucket_has_it_soon_without_any_snapshot_though_it_failed(
    finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody waits for that."""
    monkeypatch.setattr(runfile, "UPLOAD_SECONDS", 0.01)
    file, stored, tries = RunFile(f"memory://{uuid4().hex}", "a", print), threading.Event(), list[int]()
    put = file._store

    def fail_twice() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("no")
        put()
        stored.set()

    monkeypatch.setattr(file, "_store", fail_twice)
    file.append(b"one")
    if finished:
        file.finish()
    assert stored.wait(200)
    assert file.folder.read(file.name) == b"one"
    file.close()
