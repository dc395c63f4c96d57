"""Stores that fail: a snapshot gets through or fails in time, with words that name the place, and older ones stay good.

Here the store's words are cut short: no call takes longer than SHORT seconds. The clients' own patience is longer (s3fs
asks again for half a minute, Azure's client waits 15 s before it does), so what ends a call is this limit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pytest

from fault_proxy import BlackHole, Busy, Cut, FaultProxy, Late, Reset
from mingpt.commands import snapshots
from mingpt.data.text import TextData, open_text
from mingpt.errors import SnapshotFailed, TransientError
from mingpt.snapshot.reader import read
from mingpt.snapshot.retention import Retention
from mingpt.snapshot.store import Store
from mingpt.snapshot.writer import SnapshotWriter
from snapshot_kit import ALONE, PROVENANCE, equal, read_newest, save, state_of
from store_kit import Server, Stores, nightly

pytestmark = pytest.mark.slow
LIMIT, SHORT = "MINGPT_STORE_SECONDS", "1"
ENOUGH = "10"  # for the calls before the one that fails, on a busy machine


@dataclass
class Place:
    """A store behind a network that fails as told. It has a snapshot of step 1."""

    server: Server
    proxy: FaultProxy
    said: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"{self.server.url}/run"

    def store(self) -> Store:
        return Store(self.url)

    def save(self, step: int, retry_seconds: float = 0) -> str:
        log, retention = self.said.append, Retention(9)
        writer = SnapshotWriter(self.store(), ALONE, retention, PROVENANCE, log, retry_seconds=retry_seconds)
        return writer.save(step, state_of(step))


@pytest.fixture(params=["moto", nightly("azurite")])
def place(request: pytest.FixtureRequest, serve: Stores) -> Iterator[Place]:
    server = serve(request.param)
    proxy = FaultProxy(server.port)
    serve.direct_clients(server, proxy.port)
    try:
        there = Place(server, proxy)
        there.save(1)
        yield there
    finally:
        proxy.close()


PASSING = (
    lambda: Busy(times=3),
    lambda: Busy(times=3, status=500, code="InternalError"),
    lambda: Late(seconds=0.1),
    lambda: Reset("PUT .*model", times=1),
    lambda: Reset("PUT .*model", times=2, after=50),
    lambda: Reset("PUT .*manifest", times=1, after=50),
    lambda: BlackHole("PUT .*optimizer", times=1),
    lambda: Cut("PUT .*manifest", times=1, after=-1),  # the answer to the commit is lost
)


def test_a_fault_that_passes_costs_no_snapshot(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, make in enumerate(PASSING, 2):
        rule = make()
        place.proxy.set(rule)
        with monkeypatch.context() as patch:
            patch.setenv(LIMIT, SHORT)
            digest = place.save(step, retry_seconds=40)
        assert rule.done >= (rule.times or 1), rule
        place.proxy.set()
        assert digest == save(Store(str(tmp_path)), step) == read(place.store(), step).manifest.digest, rule
    assert place.store().steps() == [*range(len(PASSING) + 1, 0, -1)]


LASTING = (BlackHole, Busy, lambda: Busy(status=500, code="InternalError"), Reset, lambda: Cut(after=-1))


def test_a_fault_that_lasts_ends_in_time_and_says_where(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first = place.store().read_manifest(1)
    # Azure's client takes up to the whole limit for each: there, one of them stands for all.
    for make in LASTING if place.server.scheme == "s3" else LASTING[:1]:
        with monkeypatch.context() as patch:
            patch.setenv(LIMIT, SHORT)
            place.proxy.set(rule := make())
            with pytest.raises(SnapshotFailed, match=rf"step 2 .*snapshot\.dir={place.url}: ") as failed:
                place.save(2, retry_seconds=1)
            with pytest.raises(TransientError, match=rf"^snapshot\.dir={place.url}: ") as unavailable:
                read(place.store(), 1)
            assert snapshots.main(["list", place.url]) == 70, rule
            out, err = capfd.readouterr()
            assert (out, err.count("\n"), err.startswith(f"error: URL={place.url}: ")) == ("", 1, True), rule
            words = "\n".join([str(failed.value), str(unavailable.value), err, *place.said])
            assert [secret for secret in place.server.secrets() if secret in words] == [], rule
            assert rule.done > 2, rule
        place.proxy.set()
        assert place.store().steps() == [1], rule
        assert place.store().read_manifest(1) == first, rule
    assert place.save(2) == read(place.store(), 2).manifest.digest


def test_a_download_that_is_cut_off_is_no_damage(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.save(2)
    for files in ("manifest", "model"):
        with monkeypatch.context() as patch:
            patch.setenv(LIMIT, ENOUGH)
            place.proxy.set(rule := Cut(f"GET .*step-000000002/{files}", after=50))
            with pytest.raises(TransientError, match=rf"^snapshot\.dir={place.url}: "):
                read_newest(place.store(), pytest.fail)
            assert rule.done > 0
        place.proxy.set(Cut(f"GET .*step-000000002/{files}", times=1, after=50))
        assert (loaded := read_newest(place.store(), pytest.fail))
        assert equal(loaded.state, state_of(2))


def test_a_text_is_read_whole_or_not_at_all(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"To be, or not to be, that is the question. " * 200
    url = f"{place.url}/text.txt"
    place.store().fs.pipe_file(url, text)

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
