"""Stores that fail for a while: a snapshot gets through. That outlast a run's patience: tests/faults/test_outages.py.

No call takes longer than a second. The clients' own patience is longer (s3fs asks again for half a minute, Azure's
client waits 15 s before it does), so what ends a call is this limit.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mingpt.config.datasets import TextData
from mingpt.data.text import open_text
from mingpt.errors import TransientError
from mingpt.snapshot import tries
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from tests.kits.fault_proxy import FaultProxy, Rule
from tests.kits.snapshot_kit import save
from tests.kits.store_kit import Stores, nightly

pytestmark = pytest.mark.slow
Place = tuple[str, FaultProxy]


@pytest.fixture(params=["moto", nightly("azurite")])
def place(request: pytest.FixtureRequest, serve: Stores, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A folder in a bucket, and the network before it."""
    monkeypatch.setattr(tries, "FIRST_RETRY_SECONDS", 0.01)
    server = serve(request.param)
    with FaultProxy(server.port) as proxy:
        serve.direct_clients(server, proxy.server_port)
        yield f"{server.url}/run", proxy
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


def test_a_fault_that_passes_costs_no_snapshot(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, proxy = place
    for step, rule in enumerate(PASSING, 1):
        proxy.set(once := replace(rule))
        with monkeypatch.context() as patch:
            patch.setenv("MINGPT_STORE_SECONDS", "1")
            digest = save(Store(url), step, retry_seconds=40)
        proxy.set()
        assert once.done >= (rule.times or 1), rule
        assert digest == save(Store(str(tmp_path)), step) == read(Store(url), step).manifest.digest, rule
    assert Store(url).steps() == [*range(len(PASSING), 0, -1)]


def test_a_text_is_read_whole_or_not_at_all(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINGPT_STORE_SECONDS", "10")
    url, proxy = place
    settings = TextData(path=f"{url}/text.txt", cache_dir=str(tmp_path))
    Store(url).fs.pipe_file(settings.path, b"To be, or not to be. " * 400)
    proxy.set(Rule("GET .*text", download=900))  # s3fs goes on behind that, five times
    with pytest.raises(TransientError, match=rf"^data\.path={settings.path}: "):
        open_text(settings, 16)
