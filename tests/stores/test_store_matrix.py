"""What each verb makes of each fault of a store: a real S3 server behind a proxy that fails as told (fault_proxy.py).

The faults are of one object, of one answer, or of the whole store. A run has snapshots at 4, 8 and 12, of which 12 is
met by the fault. Training goes on to step 16: with the bits of a run that nothing has disturbed, or not at all.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mingpt.errors import CRASHED, FINISHED, USER_ERROR
from mingpt.files import localfile
from mingpt.snapshot import tries
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from tests.kits.branch_kit import train
from tests.kits.fault_proxy import FaultProxy, Rule
from tests.kits.run_kit import TINY
from tests.kits.store_kit import Server, Stores
from tests.kits.verb_kit import mingpt, store, verified

pytestmark = pytest.mark.slow
READERS = ("snapshots verify", "snapshots list", "snapshots digest", "evaluate")
PART, MANIFEST = "step-000000012/model", "step-000000012/manifest"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, text: Path, cache: Path) -> str:
    """The digest of step 16 of a run that nothing has disturbed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(run, text, cache, "train.max_steps=16")
    return verified(run, 16).digest


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, FaultProxy]]:
    with pytest.MonkeyPatch.context() as patch:
        # Less patience: of the client with a busy server, of ours with a store that fails.
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        patch.setenv("MINGPT_STORE_SECONDS", "60")
        patch.setattr(localfile, "PAUSES", (0, 0))
        patch.setattr(tries, "FIRST_RETRY_SECONDS", 0.01)
        stores = Stores(tmp_path_factory.mktemp("stores"), patch)
        server = stores("moto")
        with FaultProxy(server.port) as proxy:
            stores.direct_clients(server, proxy.server_port)
            yield server, proxy
            proxy.shutdown()
        stores.close()


@dataclass
class Bucket:
    """A run in a bucket, and what is before it."""

    url: str
    proxy: FaultProxy
    places: Sequence[str]

    def ends(self, verb: str) -> int:
        """The exit code of a verb that reads."""
        return mingpt.ends(verb, self.url, *(self.places[1:] if verb == "evaluate" else ()))

    def train(self, *overrides: str) -> int:
        return attempt([*TINY, *self.places, "run.name=run", "train.max_steps=16", *overrides], Lifetime())


@pytest.fixture
def bucket(
    request: pytest.FixtureRequest, served: tuple[Server, FaultProxy], trained: Path, text: Path, cache: Path,
    outlived: None,
) -> Iterator[Bucket]:  # fmt: skip
    server, proxy = served
    url = f"{server.url}/{re.sub('[^a-z]+', '-', request.node.name)}/run"
    fs = store(url).fs
    for path in trained.rglob("*"):
        if path.is_file():
            fs.pipe_file(f"{url}/{path.relative_to(trained)}", path.read_bytes())
    yield Bucket(url, proxy, (f"run.dir={url}", f"data.path={text}", f"data.cache_dir={cache}"))
    proxy.set()


# Each fault, the exit codes of READERS, and what they say.
FAULTS: dict[str, tuple[Rule, tuple[int, ...], str]] = {
    "a bit of a part, once": (Rule(f"GET .*{PART}", flip=True, times=1), (0, 0, 0, 0), ""),
    "a bit of a manifest, once": (Rule(f"GET .*{MANIFEST}", flip=True, times=1), (0, 0, 0, 0), ""),
    "a bit of a part": (Rule(f"GET .*{PART}", flip=True), (1, 0, 1, 64), "model-00001-"),
    "a bit of a manifest": (Rule(f"GET .*{MANIFEST}", flip=True), (1, 1, 1, 64), "manifest.json: its bytes"),
    "a part fails": (Rule(f"(GET|HEAD) .*{PART}", code="InternalError"), (1, 0, 70, 70), PART),
    "a manifest fails": (Rule(f"GET .*{MANIFEST}", code="InternalError"), (1, 1, 70, 70), MANIFEST),
    "a part is archived": (Rule(f"GET .*{PART}", code="InvalidObjectState"), (1, 0, 70, 70), "InvalidObjectState"),
    "a manifest has a lost key": (Rule(f"(GET|HEAD) .*{MANIFEST}", code="AccessDenied"), (1, 1, 70, 70), MANIFEST),
    "a stale listing": (Rule("GET .*list-type", hidden="000000012"), (0, 0, 0, 0), ""),
    "a listing is cut, once": (Rule("GET .*list-type", download=200, times=1), (0, 0, 0, 0), ""),
    "a connection breaks, once": (Rule(upload=0, times=1), (0, 0, 0, 0), ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_object(name: str, bucket: Bucket, whole: str, capsys: pytest.CaptureFixture[str]) -> None:
    rule, codes, says = FAULTS[name]
    for verb, code in zip(READERS, codes, strict=True):
        bucket.proxy.set(once := replace(rule))
        assert (verb, bucket.ends(verb)) == (verb, code), mingpt.out + mingpt.err
        assert once.done or verb == "snapshots list"
        if code:
            assert says in mingpt.out + mingpt.err
        if verb == "snapshots verify":  # the next older one, too
            assert "step 8: good" in mingpt.out
    bucket.proxy.set(replace(rule))
    assert bucket.train() == FINISHED, capsys.readouterr()
    bucket.proxy.set()
    assert verified(bucket.url, 16).digest == whole


OF_ALL: dict[str, tuple[Rule, int, str]] = {
    "an expired token": (Rule(code="ExpiredToken"), CRASHED, "(ExpiredToken)"),
    "no right at all": (Rule(code="AccessDenied"), USER_ERROR, "(AccessDenied)"),
    "nothing can be read": (Rule("GET .*(model|optimizer|json|run-id|yaml)", code="AccessDenied"), USER_ERROR, "kms:"),
    "a busy store": (Rule(code="InternalError"), CRASHED, "(InternalError)"),
    "the network": (Rule(upload=0), CRASHED, "try again"),
}


@pytest.mark.parametrize("name", OF_ALL)
def test_a_fault_of_the_store(name: str, bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    rule, code, says = OF_ALL[name]
    bucket.proxy.set(rule)
    for verb in READERS:
        assert (verb, bucket.ends(verb)) == (verb, code), mingpt.out + mingpt.err
        assert says in mingpt.err
    assert bucket.train() == code
    assert says in capsys.readouterr().err
    bucket.proxy.set()
    assert store(bucket.url).steps() == [12, 8, 4]  # nothing is set aside


NEWEST = "PUT .*step-000000016/"
# Of writes: the exit code of training, and of the same command again, when the store keeps its promises.
WRITES: dict[str, tuple[Rule, int]] = {
    "a manifest is dropped, once": (Rule(f"{NEWEST}manifest", dropped=True, times=1), FINISHED),
    "a manifest is dropped": (Rule(f"{NEWEST}manifest", dropped=True), CRASHED),
    "a part is dropped, once": (Rule(f"{NEWEST}model", dropped=True, times=1), FINISHED),
    "a part is dropped": (Rule(f"{NEWEST}model", dropped=True), CRASHED),
    "a claim is dropped": (Rule("PUT .*attempts/", dropped=True), CRASHED),
    "a manifest is stored, and denied": (Rule(f"{NEWEST}manifest", status=500, done_first=True, times=1), FINISHED),
    "a claim is stored, and denied": (Rule("PUT .*attempts/", status=500, done_first=True, times=1), FINISHED),
    "a stale listing after the commit": (Rule("GET .*list-type", hidden="000000016/m"), FINISHED),
    "the token ends": (Rule(NEWEST, code="ExpiredToken"), CRASHED),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_fault_of_a_write(name: str, bucket: Bucket, whole: str, capsys: pytest.CaptureFixture[str]) -> None:
    rule, code = WRITES[name]
    bucket.proxy.set(once := replace(rule))
    ended = bucket.train("snapshot.retry_seconds=0.1")
    said = capsys.readouterr()
    assert ended == code, said
    assert once.done
    bucket.proxy.set()
    assert store(bucket.url).steps()[0] == (16 if code == FINISHED else 12)
    assert ("finished" in said.out) == (code == FINISHED)
    assert bucket.train() == FINISHED
    assert verified(bucket.url, 16).digest == whole
