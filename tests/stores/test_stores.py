"""The same promises on every kind of store: real servers on loopback, memory, and a local folder."""

import re
import time
from pathlib import Path

import fsspec
import pytest

from mingpt.cli import cli
from mingpt.errors import USER_ERROR, Damaged, Superseded, UserError
from mingpt.preflight.places import write
from mingpt.snapshot import pieces
from mingpt.snapshot.reader import read
from mingpt.snapshot.retention import Retention, leftovers
from mingpt.snapshot.store import Store
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from tests.kits.run_kit import TINY
from tests.kits.snapshot_kit import equal, read_newest, save, state_of
from tests.kits.store_kit import Stores, nightly

ALL = ("local", "memory", pytest.param("moto", marks=pytest.mark.slow), *map(nightly, ("azurite", "proxied", "google")))
# Those that refuse to create what exists. On the others the last writer of a step has the word.
CONDITIONAL = {"local", "memory", "moto", "azurite"}
MISSING = "there is no such file or bucket"


@pytest.mark.parametrize("kind", ALL)
def test_every_store_keeps_the_promises(
    kind: str, serve: Stores, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "RANGE_BYTES", 100)  # so that a part is read in several
    here = {"local": str(tmp_path / "local"), "memory": f"memory://{tmp_path}"}
    url = here.get(kind) or f"{serve(kind).url}/some/where"
    store, elsewhere = Store(url), Store(str(tmp_path / "elsewhere"))
    assert store.steps() == []
    assert read_newest(store, pytest.fail) is None

    # What is saved is listed and read back.
    digests = {step: save(store, step) for step in (1, 2, 10)}
    assert digests == {step: save(elsewhere, step) for step in (1, 2, 10)}
    assert Store(url).steps() == [10, 2, 1]
    for step, digest in digests.items():
        loaded = read(store, step)
        assert loaded.manifest.digest == digest
        assert equal(loaded.state, state_of(step))
        assert {(f.name, f.size) for f in store.files(step)} == {(f.name, f.size) for f in elsewhere.files(step)}
        assert all(f.modified is not None and abs(time.time() - f.modified) < 3600 for f in store.files(step))
    assert store.conditional_puts == (kind in CONDITIONAL)
    assert store.files(None) == []  # of that trial, nothing is left

    # Who comes second to a step.
    manifest = store.read_manifest(10)
    save(Store(url), 10)  # the same bits
    assert store.read_manifest(10) == manifest
    if kind in CONDITIONAL:
        with pytest.raises(Superseded, match=f"attempt 1.*{digests[10][:16]}"):
            save(Store(url), 10, state_of(4))
        assert store.read_manifest(10) == manifest
    else:
        assert save(Store(url), 10, state_of(4)) != digests[10]
    assert capsys.readouterr().out == ""

    # What is damaged is set aside, and the step before taken.
    said = list[str]()
    for step, name in ((11, "optimizer"), (12, "model"), (13, "manifest")):
        save(store, step)
        [file] = (f"{store.folder(step)}/{f.name}" for f in store.files(step) if f.name.startswith(name))
        if name == "model":
            store.fs.rm_file(file)
        else:
            store.fs.pipe_file(file, b"")  # a range of nothing is an error of S3's
        with pytest.raises(Damaged, match=rf"^{name}"):
            read(store, step)
    assert (newest := read_newest(Store(url), said.append))
    assert newest.manifest.step == 10
    assert [re.findall(r"^DAMAGED SNAPSHOT of step (\d+) in (.*?): ", line) for line in said] == [
        [(str(step), url)] for step in (13, 12, 11)
    ]
    assert [sum(f.is_set_aside for f in store.files(step)) for step in (13, 12, 11, 10)] == [1, 1, 1, 0]
    assert save(store, 13) == read(store, 13).manifest.digest  # the step may be written again

    # What need not stay goes, and so does what the dead left.
    save(store, 20, keep=Retention(1, keep_every=5))
    assert store.steps() == [20, 10]
    store.fs.rm_file(f"{store.folder(10)}/manifest.json")
    store.fs.pipe_file(f"{store.root}/.probe-of-a-dead-writer", b"1")
    assert store.steps() == [20]
    left = [f for f in leftovers(store, 3600, 0, now=lambda: time.time() + 7200) if f.step in (None, 10)]
    assert {f.name.partition("-")[0] for f in left} == {".probe", "model", "optimizer"}
    assert leftovers(store, 3600, 0) == []
    store.remove(left)
    assert 10 not in store.folders()
    assert store.files(None) == []
    if kind not in here:  # nobody creates a bucket: it is a mistake of whoever named it
        scheme = url.partition("://")[0]
        url = f"{scheme}://no-such-bucket/run"
        with pytest.raises(UserError, match=MISSING):
            write([("run.dir", url)], "me", f"{url}/snapshots")  # preflight's
        assert cli.run("snapshots", ["list", url]) == USER_ERROR
        assert attempt([*TINY, "data=random", f"run.dir={url}"], Lifetime()) == USER_ERROR
        assert not fsspec.filesystem(scheme).exists("no-such-bucket")
        assert MISSING in capsys.readouterr().err
