"""Stores that fail: a snapshot gets through or fails in time, with words that name the place, and older ones stay good.

Here the store's words are cut short: no call takes longer than SHORT seconds. The clients' own patience is longer (s3fs
asks again for half a minute, Azure's client waits 15 s before it does), so what ends a call is this limit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from fault_proxy import FaultProxy, Rule
from mingpt import cli
from mingpt.data.text import TextData, open_text
from mingpt.errors import SnapshotFailed, TransientError
from mingpt.snapshot import writer as writer_module
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from snapshot_kit import equal, read_newest, save, state_of
from store_kit import HIDDEN, Stores, nightly

pytestmark = pytest.mark.slow
SHORT = "1"
ENOUGH = "10"  # for the calls before the one that fails, on a busy machine


class Place:
    """A store behind a network that fails as told. It has a snapshot of step 1."""

    def __init__(self, url: str, proxy: FaultProxy) -> None:
        self.url, self.proxy = url, proxy
        save(self.store, 1)

    @property
    def store(self) -> Store:
        """With the limit that is set now."""
        return Store(self.url)

    @contextmanager
    def fault(self, rule: Rule, limit: str) -> Iterator[None]:
        """For a while; it is seen, as many times as it happens."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MINGPT_STORE_SECONDS", limit)
            self.proxy.set(rule)
            yield
        self.proxy.set()
        assert rule.done >= (rule.times or 1), rule


@pytest.fixture(params=["moto", nightly("azurite")])
def place(request: pytest.FixtureRequest, serve: Stores, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(writer_module, "FIRST_RETRY_SECONDS", 0.01)
    server = serve(request.param)
    with FaultProxy(server.port) as proxy:
        serve.direct_clients(server, proxy.server_port)
        yield Place(f"{server.url}/run", proxy)
        proxy.shutdown()


PASSING = (
    Rule(times=3, status=503),
    Rule(times=3, status=500),
    Rule(late=0.1),
    Rule("PUT .*model", times=1, upload=0),
    Rule("PUT .*model", times=2, upload=50),
    Rule("PUT .*manifest", times=1, upload=50),
    Rule("PUT .*optimizer", times=1, silent=True),
    Rule("PUT .*manifest", times=1, download=-1),  # the answer to the commit is lost
)
LASTING = (Rule(silent=True), Rule(status=503), Rule(status=500), Rule(upload=0), Rule(download=-1))


def test_a_fault_that_passes_costs_no_snapshot(place: Place, tmp_path: Path) -> None:
    for step, rule in enumerate(PASSING, 2):
        with place.fault(replace(rule), SHORT):
            digest = save(place.store, step, retry_seconds=40)
        assert digest == save(Store(str(tmp_path)), step) == read(place.store, step).manifest.digest, rule
    assert place.store.steps() == [*range(len(PASSING) + 1, 0, -1)]


def test_a_fault_that_lasts_ends_in_time_and_says_where(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    first = place.store.read_manifest(1)
    # Azure's client takes up to the whole limit for each: there, one of them stands for all.
    for rule in LASTING if place.url.startswith("s3") else LASTING[:1]:
        with place.fault(replace(rule, times=None), SHORT):
            with pytest.raises(SnapshotFailed, match=rf"step 2 .*snapshot\.dir={place.url}: ") as failed:
                save(place.store, 2, retry_seconds=0.1)
            with pytest.raises(TransientError, match=rf"^snapshot\.dir={place.url}: ") as unavailable:
                read(place.store, 1)
            said, _ = capfd.readouterr()
            assert cli.run("snapshots", ["list", place.url]) == 70, rule
        out, err = capfd.readouterr()
        assert (out, err.count("\n"), err.startswith(f"error: URL={place.url}: ")) == ("", 1, True), rule
        assert HIDDEN not in f"{failed.value} {unavailable.value} {err} {said}", rule
        assert place.store.steps() == [1], rule
        assert place.store.read_manifest(1) == first, rule
    assert save(place.store, 2) == read(place.store, 2).manifest.digest


def test_a_download_that_is_cut_off_is_no_damage(place: Place) -> None:
    save(place.store, 2)
    for files in ("manifest", "model"):
        cut = f"GET .*step-000000002/{files}"
        unavailable = pytest.raises(TransientError, match=rf"^snapshot\.dir={place.url}: ")
        with place.fault(Rule(cut, download=50), ENOUGH), unavailable:
            read_newest(place.store, pytest.fail)
        with place.fault(Rule(cut, times=1, download=50), ENOUGH):
            assert (loaded := read_newest(place.store, pytest.fail))
        assert equal(loaded.state, state_of(2))


def test_a_text_is_read_whole_or_not_at_all(place: Place, tmp_path: Path) -> None:
    text = b"To be, or not to be, that is the question. " * 200
    settings = TextData(path=f"{place.url}/text.txt", cache_dir=str(tmp_path))
    place.store.fs.pipe_file(settings.path, text)
    cut = Rule("GET .*text", download=900)
    for rule, limit in (cut, ENOUGH), (Rule("(GET|HEAD)", status=503), SHORT), (Rule(silent=True), SHORT):
        with place.fault(rule, limit), pytest.raises(TransientError, match=rf"^data\.path={settings.path}: "):
            open_text(settings, 16)
    with place.fault(replace(cut, times=1, done=0), ENOUGH):
        assert open_text(settings, 16).sha256 == sha256(text).hexdigest()
