"""`mingpt fork`: what it shares with its parent, what it takes from a stranger, and that it goes on as a run."""

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mingpt.commands import fork as forking
from mingpt.history.history import History
from mingpt.observe.trace import read_trace
from mingpt.replay.replaying import replay
from mingpt.snapshot.attempts import parent_of
from mingpt.snapshot.format import MANIFEST
from mingpt.snapshot.manifest import encode_manifest
from mingpt.snapshot.store import Store
from mingpt.tiers.hot import find_run_id
from tests.kits.branch_kit import go_on
from tests.kits.told import Told
from tests.kits.verb_kit import mingpt, store, verified

pytestmark = pytest.mark.usefixtures("base")
FORK = "fork --trust base@8 new"
STEP_8 = "snapshots/step-000000008"


def inodes(folder: str) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in Path(folder, STEP_8).glob("*.safetensors")}


def test_a_fork_on_the_same_disk_has_the_files_of_its_parent(base: Path, tmp_path: Path) -> None:
    before = sorted(base.rglob("*"))
    said = mingpt(f"fork --trust {base}@8 {tmp_path}/new optimizer.lr=0.005")
    assert f"mingpt train --config-dir {tmp_path}/new --config-name config\n" in said
    assert inodes("new") == inodes("base")
    assert sorted(base.rglob("*")) == before
    fresh = [p for p in Path("new").rglob("*") if p.is_file() and p.stat().st_nlink == 1]
    assert sorted(p.name for p in fresh) == ["config.yaml", MANIFEST, "run-id"]
    ours, theirs = verified("new", 8), verified("base", 8)
    assert (ours.digest, ours.run, ours.config) == (theirs.digest, "new", theirs.config)
    parent = parent_of(ours)
    assert parent
    assert (parent.run, parent.step, parent.digest, parent.keys) == ("run", 8, theirs.digest, ("optimizer.lr",))
    assert parent.id == find_run_id("base") != find_run_id("new")


def test_a_fork_that_has_no_steps_left_says_so(base: Path) -> None:
    """Then the command that it prints needs a number; after any other step it does not."""
    finished, older = (mingpt(f"fork --trust base@{s} {s}") for s in (12, 8))
    assert "no steps left, since train.max_steps=12" in finished
    assert finished.splitlines()[-1].endswith(" train.max_steps=…")
    assert "train.max_steps" not in older


def test_a_fork_with_nothing_changed_computes_what_its_parent_has(trained: Path, base: Path) -> None:
    mingpt(FORK)
    shutil.rmtree(base)  # its parent's retention, or somebody
    go_on("new")
    assert verified("new", 12).digest == verified(trained, 12).digest
    assert read_trace("new")[3].tobytes() == read_trace(str(trained))[1][8:].tobytes()


def test_changed_keys_and_data_need_no_resume_changed_and_the_history_has_them(text: Path) -> None:
    Path("other.txt").write_text(text.read_text()[:-1] + "e")
    mingpt(f"{FORK} optimizer.lr=0.005 train.max_steps=10 optimizer.name=muon data.path=other.txt")
    go_on("new")
    new = verified("new", 10)
    assert new.config["optimizer"]["lr"] == 0.005
    *_, parted, own = new.history
    assert parted["changes"]["optimizer.lr"] == [0.01, 0.005]
    assert "changes" not in own
    assert (parted["attempt"], own["attempt"], own["from_step"]) == (2, 3, 8)


@pytest.mark.parametrize(
    "arguments",
    [
        "base@9 new", "base@8 base", "base@8 new optimizer.lr=-1 optimiser.lr=1 train.max_step=3", "base@8 new/a=b",
        "new@8 new2", "base@8 new run.dir=new/other", "base@8 base/snapshots", "base@8 base/snapshots/inner",
    ],
)  # fmt: skip
def test_mistakes_are_told_and_nothing_is_made(arguments: str, tmp_path: Path, told: Told) -> None:
    before = sorted(tmp_path.rglob("*"))
    told(mingpt.refused(f"fork --trust {arguments}"))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_fork_of_a_fork_that_has_not_trained_loses_no_setting() -> None:
    """The first snapshot of the fork has its parent's config."""
    mingpt(f"{FORK} optimizer.lr=0.005 train.max_steps=20")
    assert "optimizer.lr=…, train.max_steps=…" in mingpt.refused("fork --trust new other optimizer.weight_decay=0.3")
    assert not Path("other").exists()
    mingpt("fork --trust new other optimizer.lr=0.005 train.max_steps=10")
    go_on("other")
    assert verified("other", 10).config["optimizer"]["lr"] == 0.005


def on_line(url: str) -> list[int]:
    past = History.open(url)
    return sorted(past.bases(past.steps[-1]))


def test_the_first_snapshot_of_a_fork_of_a_fork_is_on_its_line(text: Path, cache: Path) -> None:
    """Also after the run was taken back to it."""
    mingpt(FORK)
    mingpt("fork --trust new two")
    go_on("two")
    with replay("two", 9, (f"data.path={text}", f"data.cache_dir={cache}")) as run:
        assert run.base == 8
        assert run.advance().same
    assert on_line("two") == [8, 12]
    mingpt("rewind two@8")
    assert on_line("two") == [8]


# --- what a stranger may have written ---


def rewrite(folder: str, **fields: object) -> None:
    """Step 8 with these fields, in a manifest that is as good as any."""
    content = encode_manifest(verified(folder, 8).model_copy(update=fields))
    Path(folder, STEP_8, MANIFEST).write_bytes(content)


def configure(**sections: Any) -> None:
    config = {**verified("base", 8).config}
    for name, values in sections.items():
        config[name] = values if "_target_" in str(values) else config.get(name, {}) | values
    rewrite("base", config=config)


def refused(trust: str = "") -> list[str]:
    """The keys that a fork of the rewritten step refuses."""
    mingpt.refused(f"fork {trust} base@8 new")
    assert not Path("new").exists()
    return sorted(re.findall(r"(observers|[a-z]+\.\w+) (?:is|names|holds) ", mingpt.err))


def test_what_is_written_in_a_strangers_config_is_neither_resolved_nor_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OF_MINE", "nobody-may-see")
    Path("evil_code.py").write_text("open('ran', 'w')")
    configure(
        hydra={"searchpath": ["pkg://evil_code"]},
        data={"path": "${oc.env:OF_MINE}"},
        model={"kind": "own", "_target_": "evil_code.Net"},
        optimizer={"_target_": "evil_code.Sgd"},
        schedule={"_target_": "evil_code.fall"},
        observers=[{"_target_": "evil_code.Spy"}],
    )
    for trust in ("", "--trust"):
        assert {"data.path", "observers", *(f"{s}._target_" for s in ("model", "optimizer", "schedule"))} <= {
            *refused(trust)
        }
    assert not Path("ran").exists()
    assert "evil_code" not in sys.modules


PLACES: dict[str, dict[str, Any]] = {
    "data": {"path": "http://127.0.0.1:9/latest/meta-data"},
    "health": {"notify": "http://127.0.0.1:9/hook"},
    "model": {"init_from": "/etc"},
    "snapshot": {"hot_dir": "elsewhere"},
    "world": {"notice": "aws:http://127.0.0.1:9/imds"},
}


def test_no_place_and_no_program_is_taken_from_a_strangers_config() -> None:
    configure(**PLACES)
    named = [f"{section}.{name}" for section, values in PLACES.items() for name in values]
    named.remove("health.notify")  # a secret, which is blanked as the manifest is read
    assert refused() == named
    mingpt(
        "fork base@8 new data.path=text.txt health.notify=null model.init_from=null snapshot.hot_dir=/dev/shm "
        "world.notice=none"
    )


@pytest.mark.parametrize("place", ["./base/x/../text.txt", "/etc/passwd", "../text.txt"])
def test_the_strangers_own_folder_is_no_place_and_what_is_kept_is_told(place: str) -> None:
    configure(data={"path": place})
    assert refused() == ["data.path"]
    configure(data={"path": "texts/mine.txt"})
    assert "data.path=texts/mine.txt" in mingpt("fork base@8 new")


def test_no_line_and_no_escape_code_of_a_strangers_is_printed(text: Path) -> None:
    forged, said = "a\nfinished: step 2000\u2028finished: \x1b[2J", ""
    mingpt("fork --trust base@8 child")
    for folder in ("base", "child"):
        old = verified(folder, 8)
        entry = old.history[-1] | {"world_size": forged, "changes": {forged: [forged, 1]}}
        if parent := entry.get("fork"):
            entry["fork"] = parent | {"run": forged, "dir": forged, "keys": [forged]}
        config = {**old.config, "seed": forged, "health": {"notify": f"http://h/S3CRET{forged}"}, forged: 1}
        rewrite(folder, run=forged, history=[*old.history[:-1], entry], config=config)
    for _ in range(2):  # the second time as the newest, from which more is shown
        for words in (
            "snapshots list child", "snapshots show child", "snapshots list .", "snapshots show base@8",
            "snapshots verify base@8", "log .", "log . --graph", "diff base@8 child", "report base child --out page",
            f"fork base@8 new data.path={text} health.notify=null seed=1",
        ):  # fmt: skip
            mingpt.ends(words)
            said += mingpt.out + mingpt.err
        shutil.rmtree("base/snapshots/step-000000012", ignore_errors=True)
    said += Path("page").read_text()
    assert not [line for line in said.splitlines() if line.lstrip(" ├─└│").startswith("finished: ")]
    assert "\x1b" not in said
    assert "S3CRET" not in said


# --- killed, raced, and on other disks ---


@pytest.mark.parametrize("where", ["create_config", "commit", "after"])
def test_a_fork_that_was_killed_is_made_by_the_same_command_and_by_no_other(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(forking, where, None)

    def killed(*arguments: Any) -> None:
        if real and where == "create_config":
            real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Store if where == "commit" else forking, where, killed, raising=where != "after")
        mingpt.ends(FORK)
    mingpt.refused("fork --trust base@4 new")
    mingpt.refused(f"{FORK} seed=2")
    mingpt(FORK)
    assert store("new").folders() == [8]
    verified("new", 8)
    assert not [*Path("new").rglob("*.tmp")]
    go_on("new")
    mingpt.refused(FORK)


def test_of_two_forks_into_one_place_at_once_one_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    real = forking.make_run_dir

    def overtaken(run_dir: str) -> None:
        """The other fork has seen that nothing is there."""
        monkeypatch.setattr(forking, "make_run_dir", real)
        mingpt("fork --trust base@4 new")
        real(run_dir)

    monkeypatch.setattr(forking, "make_run_dir", overtaken)
    mingpt(FORK, code=64)
    assert store("new").folders() == [4]


def test_a_disk_without_hard_links_gets_a_verified_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(src: str, dst: str, **options: bool) -> None:
        if ".safetensors" in str(src):
            raise OSError(18, "Invalid cross-device link")
        real(src, dst, **options)

    monkeypatch.setattr(os, "link", link)
    mingpt(FORK)
    assert not {*inodes("new").values()} & {*inodes("base").values()}
    verified("new", 8)


def test_a_fork_within_a_bucket_moves_no_part_and_is_whole_without_its_parent(
    serve: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve("moto")
    fs = store("s3://runs/base").fs
    fs.put("base", "runs/", recursive=True)
    monkeypatch.setattr(forking, "copy_part", pytest.fail)
    mingpt("fork --trust s3://runs/base@8 s3://runs/new optimizer.lr=0.005")
    fs.rm("runs/base", recursive=True)
    assert verified("s3://runs/new", 8).digest == verified("base", 8).digest


def test_a_damaged_manifest_says_so_for_itself_in_the_log_of_many(base: Path) -> None:
    """One that was set aside, and one that was not."""
    shutil.copytree(base, "bad")
    mingpt("snapshots rewind bad@8")
    [aside] = Path("bad/snapshots/step-000000012").glob("set-aside-*")
    for path in (aside, Path("bad/snapshots/step-000000004/manifest.json")):
        path.write_text("{}")
    told = mingpt("log .")
    assert "run (./base): step 12, 1 attempt" in told
    assert f"step 12: DAMAGED, set aside as {aside.name}: manifest.json " in told
    assert "step 4: DAMAGED: manifest.json " in told
    assert {run["dir"]: len(run["damaged"]) for run in mingpt.json("log .")} == {"./base": 0, "./bad": 2}
    mingpt("diff bad --attempts 1 2")
    assert f"bad: step 12: DAMAGED, set aside as {aside.name}: " in mingpt.err
    assert "DAMAGED" in mingpt("snapshots list bad", code=1)
    assert "DAMAGED" not in mingpt("snapshots list .")  # its newest is good
    mingpt("snapshots prune bad --keep 1")  # what a rewind has set aside goes, readable or not
    assert not aside.exists()
