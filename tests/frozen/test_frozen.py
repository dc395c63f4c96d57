"""Runs of earlier versions, made by the program in made-by.txt: every verb opens them, and they go on with the same
bits.

digests.json has the digest of each stored snapshot, which no machine may read otherwise; and for known machines that of
each run four steps later.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch

from mingpt.cli import main
from mingpt.compute.numerics import NUMERICS, cpu_vendor, probe
from mingpt.errors import FINISHED, USER_ERROR
from mingpt.gone import instead
from mingpt.snapshot.hot import find_run_id, folder
from mingpt.snapshot.reader import read, verify
from mingpt.snapshot.store import Store
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from paths_kit import ROOT
from store_kit import Stores

FROZEN = ROOT / "tests/frozen"
RECORDED = json.loads((FROZEN / "digests.json").read_text())
STORED: dict[str, dict[str, str]] = RECORDED["stored"]
# To be said again by whoever looks at a run with code of its own: a snapshot imports nothing.
OWN = {"dropped": ("data._target_=poison_kit.rows", "model._target_=poison_kit.Line")}
GONE = {"images"}  # kinds of data that no longer exist: such runs are listed, verified and reported, no more
GOING = sorted(set(STORED) - GONE)
LAST = {"dropped": 24, "rewound": 6, "hot": 12, "bucket": 8}
MORE = 4  # steps

Verb = Callable[..., str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of this folder, to be changed, as the current one."""
    for name in ("data", "runs", "bucket"):
        shutil.copytree(FROZEN / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def bucket(here: Path, serve: Stores) -> str:
    """The run that lies in S3, there."""
    url = serve("moto").url
    fsspec.filesystem("s3").put(f"{here}/bucket", url.partition("://")[2] + "/", recursive=True)
    return f"{url}/bucket"


@pytest.fixture
def mingpt(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verb:
    def run(*arguments: str, code: int = FINISHED) -> str:
        monkeypatch.setattr(sys, "argv", ["mingpt", *arguments])
        capsys.readouterr()
        try:
            ended = main()
        except SystemExit as end:
            ended = int(end.code or 0)
        shown = capsys.readouterr()
        assert ended == code, (arguments, shown)
        return shown.out

    return run


def machine() -> str:
    """What this package's bits depend on here, as tests/compute/test_numerics.py has it; torch's builds are alike."""
    capability = torch.backends.cpu.get_cpu_capability()
    torch_version = torch.__version__.partition("+")[0]
    return f"{NUMERICS} torch {torch_version} {cpu_vendor()} {capability} {probe(torch.device('cpu'))}"


def place(name: str) -> str:
    return {"bucket": "bucket", "sweep": "runs/sweep/optimizer.lr-0.01"}.get(name, f"runs/{name}")


def last(name: str) -> int:
    return LAST.get(name, 12)


def resume(url: str, *overrides: str) -> int:
    """As `mingpt fork` says it: the run's own config, and more steps."""
    shutil.rmtree("own", ignore_errors=True)
    Path("own").mkdir()
    shutil.copy(Path(url, "config.yaml"), "own")
    return attempt(["--config-dir=own", "--config-name=config", *overrides], Lifetime())


def heat(name: str) -> Path:
    """Put the hot snapshots where this machine looks for them: the folder's name follows from where the run lies."""
    found = find_run_id(f"runs/{name}")
    assert found
    own = folder("hot", f"runs/{name}", found)
    own.parent.mkdir(parents=True)
    shutil.copytree(next((FROZEN / "hot").glob("*/*")), own)
    return own


def test_every_snapshot_reads_as_it_was_written() -> None:
    """On each machine, each byte against its checksum."""
    stores = {name: Store(str(FROZEN / place(name) / "snapshots")) for name in STORED}
    assert {
        name: {str(step): digest(store, step) for step in store.steps()} for name, store in stores.items()
    } == STORED


def digest(store: Store, step: int) -> str:
    verify(store, step)
    return read(store, step).manifest.digest


@pytest.mark.parametrize("name", sorted(set(STORED) - {"bucket"}))
def test_what_only_looks(name: str, mingpt: Verb) -> None:
    url, newest = place(name), max(STORED[name], key=int)
    assert json.loads(mingpt("snapshots", "list", url, "--json"))
    assert mingpt("snapshots", "verify", url).count(": good, ") == len(STORED[name])
    assert STORED[name][newest] in mingpt("snapshots", "digest", url)
    assert STORED[name][newest] in mingpt("snapshots", "show", url)
    assert STORED[name][newest][:8] in mingpt("log", url, "--graph")
    mingpt("report", url)
    assert "<html" in Path(url, "report.html").read_text()


@pytest.mark.parametrize("name", sorted(GONE))
def test_data_that_are_gone_say_what_to_use(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resume(place(name)) == USER_ERROR
    assert capsys.readouterr().err == f"error: {instead(f'data.kind={name}')}\n"


@pytest.mark.parametrize("name", GOING)
def test_it_goes_on_with_the_same_bits(
    name: str, mingpt: Verb, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    url = request.getfixturevalue("bucket") if name == "bucket" else place(name)
    last = LAST.get(name, 12)
    if name == "hot":  # its newest snapshot is in memory
        assert digest(Store(str(heat(name)), "snapshot.hot_dir"), last) == RECORDED["hot"]
    assert resume(place(name), f"train.max_steps={last + MORE}", "snapshot.hot_dir=hot") == FINISHED
    where = "hot/mingpt" if name == "hot" else f"{url}/snapshots"
    assert f"resumed from step {last} of {where}" in capsys.readouterr().out
    # A step of the past with the bits that it recorded then, on a machine that gives them; a new one on every machine.
    known = RECORDED["resumed"].get(machine())
    for step in (9 if name == "forked" else 2, last + MORE) if known else (last + MORE,):
        shown = mingpt("replay", url, "--step", str(step), "--samples", "0", *OWN.get(name, ()))
        assert "same loss and norm bits as recorded" in shown
    mingpt("audit", url, "--from", str(last + 1) if known is None else "1", *OWN.get(name, ()))
    mingpt("diff", url, url, "--exit-code")
    found = digest(Store(f"{url}/snapshots"), last + MORE)
    if known is None:
        pytest.skip(f"which bits come out is not recorded for this machine: {machine()}")
    assert (name, found) == (name, known[name])


def test_what_is_off_the_line_never_comes_back(here: Path, mingpt: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    """An attempt that a newer one had overtaken commits late; memory holds a step from before a rewind."""
    late = next(Path("runs/rewound/snapshots/step-000000012").glob("set-aside-*"))
    late.rename(late.with_name("manifest.json"))
    mingpt("rewind", "runs/hot@8", "--hot-dir", "hot")
    heat("hot")  # as in the memory of another node
    for name, step in (("rewound", 6), ("hot", 8)):
        capsys.readouterr()
        assert resume(f"runs/{name}", "train.max_steps=14", "snapshot.hot_dir=hot") == FINISHED
        assert f"resumed from step {step} of runs/{name}/snapshots" in capsys.readouterr().out
    assert Store("runs/rewound/snapshots").steps()[-3:] == [8, 6, 4]


def test_a_bucket_is_looked_at_and_its_rewind_undone(bucket: str, mingpt: Verb) -> None:
    assert mingpt("snapshots", "digest", bucket).split() == [STORED["bucket"]["8"]]
    assert STORED["bucket"]["8"][:8] in mingpt("log", bucket, "--graph")
    mingpt("report", bucket)
    mingpt("rewind", bucket, "--undo")
    assert Store(f"{bucket}/snapshots").steps() == [12, 8, 4]


@pytest.mark.parametrize("name", ["resized", "modern", "chat", "mix"])
def test_it_is_forked_and_rewound(name: str, mingpt: Verb) -> None:
    mingpt("fork", f"{place(name)}@8", "runs/new", "optimizer.lr=0.005")
    assert digest(Store("runs/new/snapshots"), 8) == STORED[name]["8"]
    assert resume("runs/new", "train.max_steps=10") == FINISHED
    mingpt("rewind", f"{place(name)}@4")
    assert Store(f"{place(name)}/snapshots").steps() == [4]
    mingpt("rewind", place(name), "--undo")
    assert Store(f"{place(name)}/snapshots").steps() == [12, 8, 4]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resized", "modern", "bpe", "chat"])
def test_its_model_is_used(name: str, mingpt: Verb) -> None:
    url = place(name)
    mingpt("generate", url, "--tokens", "4", "--temperature", "0")
    code = "import sys; from mingpt.cli import main; sys.exit(main())"  # it ends its process
    shown = subprocess.run([sys.executable, "-c", code, "evaluate", url], capture_output=True, text=True, timeout=600)
    assert shown.returncode == FINISHED, shown
    mingpt("export", url, "exported")
    assert Path("exported/model.safetensors").is_file()


def test_a_sweep_is_shown(mingpt: Verb) -> None:
    assert STORED["sweep"]["12"][:8] in mingpt("log", "runs/sweep")
    assert mingpt("report", "runs/sweep").count(" finished ") == 2
