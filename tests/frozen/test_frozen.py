"""Runs of each version, made by make.py: every verb opens them, and they go on with the same bits.

Each archive's digests.json has the digest of each stored snapshot, which no machine may read otherwise; and for known
machines that of each run four steps later.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from mingpt.compute.numerics import NUMERICS, cpu_vendor, probe
from mingpt.errors import FINISHED
from mingpt.snapshot.reader import verify
from mingpt.snapshot.store import Store
from mingpt.tiers.hot import find_run_id, folder
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from tests.kits.frozen_kit import ARCHIVES, unpack
from tests.kits.store_kit import Stores
from tests.kits.verb_kit import mingpt, store, verified

LAST = {"resized": 12, "rewound": 6, "hot": 12, "bucket": 8}
MORE = 4  # steps


@pytest.fixture(autouse=True, params=ARCHIVES, ids=lambda archive: archive.name.removesuffix(".tar.xz"))
def recorded(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is known of a version's runs, which lie in the current folder, to be changed."""
    monkeypatch.chdir(unpack(request.param, tmp_path))
    Path("hot").rename("memory")  # not where a node looks for its own: see heat
    return json.loads(Path("digests.json").read_text())


@pytest.fixture
def bucket(serve: Stores) -> str:
    """The run that lies in S3, there."""
    url = serve("moto").url
    fsspec.filesystem("s3").put("bucket", url.partition("://")[2] + "/", recursive=True)
    return f"{url}/bucket"


def machine() -> str:
    """What this package's bits depend on here; torch's builds are alike."""
    capability = torch.backends.cpu.get_cpu_capability()
    torch_version = torch.__version__.partition("+")[0]
    return f"{NUMERICS} torch {torch_version} {cpu_vendor()} {capability} {probe(torch.device('cpu'))}"


def place(name: str) -> str:
    return name if name == "bucket" else f"runs/{name}"


def resume(url: str, *overrides: str) -> int:
    """As `mingpt fork` says it: the run's own config, and more steps."""
    shutil.rmtree("own", ignore_errors=True)
    Path("own").mkdir()
    shutil.copy(Path(url, "config.yaml"), "own")
    return attempt(["--config-dir=own", "--config-name=config", "snapshot.hot_dir=hot", *overrides], Lifetime())


def heat() -> Path:
    """Put the hot snapshots where this machine looks for them: the folder's name follows from where the run lies."""
    found = find_run_id("runs/hot")
    assert found
    own = folder("hot", "runs/hot", found)
    return Path(shutil.copytree(next(Path("memory").glob("*/*")), own))


@pytest.mark.parametrize("name", sorted(LAST))
def test_every_snapshot_reads_as_it_was_written_and_what_only_looks_opens_it(name: str, recorded: Any) -> None:
    """On each machine, each byte against its checksum."""
    url, stored = place(name), recorded["stored"][name]
    assert {str(step): verified(url, step).digest for step in store(url).steps()} == stored
    assert mingpt.json(f"snapshots list {url}")
    assert mingpt(f"snapshots verify {url}").count(": good, ") == len(stored)
    newest = stored[max(stored, key=int)]
    for verb in ("snapshots digest", "snapshots show"):
        assert newest in mingpt(f"{verb} {url}")
    assert newest[:8] in mingpt(f"log {url} --graph")
    mingpt(f"report {url}")
    assert "<html" in Path(url, "report.html").read_text()


@pytest.mark.parametrize("name", sorted(LAST))
def test_it_goes_on_with_the_same_bits(
    name: str, recorded: Any, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    url = request.getfixturevalue("bucket") if name == "bucket" else place(name)
    last = LAST[name]
    if name == "hot":  # its newest snapshot is in memory
        assert verify(Store(str(heat())), last).digest == recorded["hot"]
    assert resume(place(name), f"train.max_steps={last + MORE}") == FINISHED
    where = "hot/mingpt" if name == "hot" else f"{url}/snapshots"
    assert f"resumed from step {last} of {where}" in capsys.readouterr().out
    known, at_home = recorded["resumed"].get(machine()), machine() == recorded["made on"]
    if name == "resized":
        assert "same loss and norm bits" in mingpt(f"replay {url} --step {last + MORE} --samples 0")
    # Elsewhere the past has other bits than those that it recorded, and "hot" no snapshot on a disk after the past.
    if (at_home or name != "hot") and name != "bucket":  # which is as "resized" in another place
        for step in (*map(int, recorded["stored"][name] if at_home else ()), last + MORE):
            mingpt(f"replay {url}@{step} --out again")
            assert verified("again", step).digest == verified(url, step).digest
    mingpt(f"diff {url} {url} --exit-code")
    found = verified(url, last + MORE).digest
    if known is None:
        pytest.skip(f"which bits come out is not recorded for this machine: {machine()}")
    assert (name, found) == (name, known[name])


def test_what_is_off_the_line_never_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    """An attempt that a newer one had overtaken commits late; memory holds a step from before a rewind."""
    late = next(Path("runs/rewound/snapshots/step-000000012").glob("set-aside-*"))
    late.rename(late.with_name("manifest.json"))
    mingpt("rewind runs/hot@8 --hot-dir hot")
    heat()  # as in the memory of another node
    for name, step in (("rewound", 6), ("hot", 8)):
        assert resume(f"runs/{name}", "train.max_steps=14") == FINISHED
        assert f"resumed from step {step} of runs/{name}/snapshots" in capsys.readouterr().out
    assert store("runs/rewound").steps()[-3:] == [8, 6, 4]


def test_a_bucket_is_looked_at_and_its_rewind_undone(bucket: str, recorded: Any) -> None:
    newest = recorded["stored"]["bucket"]["8"]
    assert mingpt(f"snapshots digest {bucket}") == f"{newest}\n"
    assert newest[:8] in mingpt(f"log {bucket} --graph")
    mingpt(f"report {bucket}")
    mingpt(f"rewind {bucket} --undo")
    assert store(bucket).steps() == [12, 8, 4]


def test_it_is_forked_and_rewound(recorded: Any) -> None:
    url = place("resized")
    mingpt(f"fork {url}@8 runs/new optimizer.lr=0.005")
    assert verified("runs/new", 8).digest == recorded["stored"]["resized"]["8"]
    assert resume("runs/new", "train.max_steps=10") == FINISHED
    mingpt(f"rewind {url}@4")
    assert store(url).steps() == [4]
    mingpt(f"rewind {url} --undo")
    assert store(url).steps() == [12, 8, 4]


@pytest.mark.slow
def test_its_model_is_used() -> None:
    mingpt("generate runs/resized --tokens 4 --temperature 0")
    mingpt("evaluate runs/resized")
    mingpt("export runs/resized exported")
    assert Path("exported/model.safetensors").is_file()
