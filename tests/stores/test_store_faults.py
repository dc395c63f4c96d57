"""Stores that fail: a snapshot gets through or fails in time, with words that name the place, and older ones stay good.

Here the store's words are cut short: no call takes longer than SHORT seconds. The clients' own patience is longer (s3fs
asks again for half a minute, Azure's client waits 15 s before it does), so what ends a call is this limit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from fault_proxy import BlackHole, Busy, Cut, FaultProxy, Late, Reset, Rule
from mingpt.commands import snapshots
from mingpt.data.kinds.text import TextData
from mingpt.data.text import open_text
from mingpt.errors import SnapshotFailed, TransientError
from mingpt.snapshot.reader import read
from mingpt.snapshot.retention import Retention
from mingpt.snapshot.store import Store
from mingpt.snapshot.writer import SnapshotWriter
from snapshot_kit import ALONE, PROVENANCE, equal, read_newest, save, state_of
from store_kit import Server, Stores

pytestmark = pytest.mark.slow
LIMIT, SHORT = "MINGPT_STORE_SECONDS", "1"
ENOUGH = "10"  # for the calls before the one that fails, on a busy machine


@dataclass
class Place:
    """A store behind a network that fails as told."""

    server: Server
    proxy: FaultProxy
    url: str
    said: list[str]

    def store(self) -> Store:
        return Store(self.url)

    def save(self, step: int, retry_seconds: float) -> str:
        writer = SnapshotWriter(
            self.store(), ALONE, Retention(9), PROVENANCE, self.said.append, retry_seconds=retry_seconds
        )
        return writer.save(step, state_of(step))


@pytest.fixture(params=["moto", "azurite"])
def place(request: pytest.FixtureRequest, serve: Stores) -> Iterator[Place]:
    """It has a snapshot of step 1."""
    server = serve(request.param)
    proxy = FaultProxy(server.port)
    serve.direct_clients(server, proxy.port)
    try:
        there = Place(server, proxy, f"{server.url}/run", [])
        there.save(1, 0)
        yield there
    finally:
        proxy.close()


PASSING: dict[str, Callable[[], Rule]] = {
    "busy": lambda: Busy(times=3),
    "errors": lambda: Busy(times=3, status=500, code="InternalError"),
    "late": lambda: Late(seconds=0.1),
    "reset before the body": lambda: Reset("PUT .*model", times=1),
    "reset in a body": lambda: Reset("PUT .*model", times=2, after=50),
    "reset in the manifest": lambda: Reset("PUT .*manifest", times=1, after=50),
    "silent": lambda: BlackHole("PUT .*optimizer", times=1),
    "the answer to the commit is lost": lambda: Cut("PUT .*manifest", times=1, after=-1),
}


def test_a_fault_that_passes_costs_no_snapshot(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, (name, make) in enumerate(PASSING.items(), 2):
        rule = make()
        place.proxy.set(rule)
        with monkeypatch.context() as patch:
            patch.setenv(LIMIT, SHORT)
            digest = place.save(step, retry_seconds=40)
        assert rule.done >= (rule.times or 1), name
        place.proxy.set()
        assert digest == save(Store(str(tmp_path)), step), name
        assert read(place.store(), step).manifest.digest == digest, name
    assert place.store().steps() == [*range(len(PASSING) + 1, 0, -1)]


LASTING: dict[str, Callable[[], Rule]] = {
    "busy": Busy,
    "errors": lambda: Busy(status=500, code="InternalError"),
    "reset": Reset,
    "silent": BlackHole,
    "no answers": lambda: Cut(after=-1),
}


def test_a_fault_that_lasts_ends_in_time_and_says_where(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first = place.store().read_manifest(1)
    # Azure's client takes up to the whole limit for each: there, one of them stands for all.
    lasting = LASTING if place.server.scheme == "s3" else {"silent": LASTING["silent"]}
    for name, make in lasting.items():
        with monkeypatch.context() as patch:
            patch.setenv(LIMIT, SHORT)
            place.proxy.set(rule := make())
            with pytest.raises(SnapshotFailed) as failed:
                place.save(2, retry_seconds=1)
            start = f"the snapshot of step 2 could not be written: snapshot.dir={place.url}: "
            assert str(failed.value).startswith(start), name
            with pytest.raises(TransientError) as unavailable:
                read(place.store(), 1)
            assert str(unavailable.value).startswith(f"snapshot.dir={place.url}: "), name
            assert snapshots.main(["list", place.url]) == 70, name
            out, err = capfd.readouterr()
            assert out == "", name
            assert err.startswith(f"error: URL={place.url}: "), name
            assert err.count("\n") == 1, name
            words = "\n".join([str(failed.value), str(unavailable.value), err, *place.said])
            assert [secret for secret in place.server.secrets() if secret in words] == [], name
            assert rule.done > 2, name
        place.proxy.set()
        assert place.store().steps() == [1], name
        assert place.store().read_manifest(1) == first, name
    assert place.save(2, 0) == read(place.store(), 2).manifest.digest


@pytest.mark.parametrize("files", ["manifest", "model"])
def test_a_download_that_is_cut_off_is_no_damage(place: Place, files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place.save(2, 0)
    with monkeypatch.context() as patch:
        patch.setenv(LIMIT, ENOUGH)
        place.proxy.set(rule := Cut(f"GET .*step-000000002/{files}", after=50))
        with pytest.raises(TransientError, match=rf"^snapshot\.dir={place.url}: "):
            read_newest(place.store(), pytest.fail)
        assert rule.done > 0
    place.proxy.set(Cut(f"GET .*step-000000002/{files}", times=1, after=50))
    loaded = read_newest(place.store(), pytest.fail)
    assert loaded
    assert equal(loaded.state, state_of(2))


def test_a_text_is_read_whole_or_not_at_all(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"To be, or not to be, that is the question. " * 200
    url = f"{place.url}/text.txt"
    folder = place.store().fs
    assert folder.ls(place.url) != []
    folder.pipe_file(url, text)  # clients remember the listing

    def look() -> str:
        return open_text(TextData(kind="text", path=url, cache_dir=str(tmp_path)), 16).sha256

    for rule in (Cut("GET .*text", after=900), Busy("(GET|HEAD)"), BlackHole()):
        with monkeypatch.context() as patch:
            patch.setenv(LIMIT, ENOUGH)
            place.proxy.set(rule)
            with pytest.raises(TransientError, match=rf"^data\.path={url}: "):
                look()
            assert rule.done > 0
    place.proxy.set(Cut("GET .*text", times=1, after=900))
    assert look() == sha256(text).hexdigest()
