"""All names in a run's directory, times all odd kinds of files, times all verbs: nothing outside is read or written."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mingpt.cli import cli
from mingpt.errors import USER_ERROR
from mingpt.files.folder import FILES, FOLDERS, Folder
from mingpt.files.localfile import NotPlain, check_tree
from mingpt.world.lifetime import Lifetime
from tests.kits.replay_kit import files_of

# What a run writes at its next start, or may have written.
EVENTS = "events.out.tfevents.0000000002.0000000000"
LATER = ("trace/attempt-00002-000000013.bin", EVENTS,
         "metrics/attempt-00002.jsonl", "ledger/attempt-00002.json", "attempts/00002.json", "profile/x.txt",
         *FILES, *FOLDERS)  # fmt: skip


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "link": Path.symlink_to,
    "dangling": lambda path, outside: path.symlink_to(outside.parent / "made"),
    "fifo": lambda path, outside: os.mkfifo(path),
    "folder": lambda path, outside: path.mkdir(),
}


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "victim/home").mkdir(parents=True)
    (tmp_path / "victim/keys").write_text("ssh-ed25519 mine")
    return tmp_path / "victim"


def odd(run: Path, victim: Path, first: int | None) -> Iterator[str]:
    """Each name of the run in turn is something odd: of all kinds, or of one kind in turn, beginning with `first`."""
    names = {*LATER, "snapshots", *(str(path.relative_to(run)) for path in run.rglob("*"))}
    for i, name in enumerate(sorted(names)):
        path, aside = run / name, run.parent / "aside"
        for kind in KINDS if first is None else [[*KINDS][(i + first) % len(KINDS)]]:
            is_folder = path.is_dir() or name in (*FOLDERS, "snapshots")
            if kind == "folder" and is_folder:
                continue
            made = [p for p in path.parents if not p.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                path.rename(aside)
            KINDS[kind](path, victim / ("home" if is_folder else "keys"))
            yield f"{name} {kind}"
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            if aside.exists():
                aside.rename(path)
            for folder in made:
                folder.rmdir()


VERBS = {
    "report": "report {run} --out {new}.html",
    "log": "log {run}",
    "diff": "diff {run} {run}",
    "list": "snapshots list {run}",
    "show": "snapshots show {run}",
    "verify": "snapshots verify {run}",
    "prune": "snapshots prune --dry-run {run}",
    "fork": "fork --trust {run}@8 {new}",
    "generate": "generate {run} --tokens 1 --prompt t",
    "replay": "replay {run} --step 9 data.path={text}",
    "train": "train --config-dir={start} --config-name=start run.dir={run} snapshot.dir={run}/snapshots "
    "train.max_steps=13 track=[tensorboard]",
}
SLOW = ("replay", "fork", "train")
# They look at the run's directory, not at snapshots alone.
WHOLE = ("report", "log", "diff", "replay", "train")


@pytest.mark.parametrize("verb", [pytest.param(verb, marks=[pytest.mark.slow] * (verb in SLOW)) for verb in VERBS])
def test_no_verb_opens_anything_but_plain_files(
    run: Path, victim: Path, tmp_path: Path, text: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, new, start = files_of(victim), tmp_path / "new", tmp_path / "start"
    start.mkdir()
    shutil.copy(run / "config.yaml", start / "start.yaml")
    name, *words = VERBS[verb].format(run=run, new=new, text=text, start=start).split()
    wrong = []

    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    # Of all kinds where it takes no time.
    for case in odd(run, victim, None if verb == "log" else list(VERBS).index(verb)):
        signal.alarm(60)  # opening a FIFO blocks
        code = cli.run(name, words, Lifetime())
        signal.alarm(0)
        inside = case.split()[0]
        refused = verb in WHOLE and inside.partition("/")[0] in (*FILES, *FOLDERS, EVENTS) and inside.count("/") < 2
        if code not in ((USER_ERROR,) if refused and not case.endswith("folder") else (0, 1, USER_ERROR)):
            wrong.append(f"{case}: {code}")
        capsys.readouterr()
        shutil.rmtree(new, ignore_errors=True)
        (tmp_path / "new.html").unlink(missing_ok=True)
    assert wrong == []
    assert files_of(victim) == before


def test_a_run_directory_may_be_a_link_that_the_user_names(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    folder = Folder(str(tmp_path / "link"))
    folder.check()
    folder.write("run-id", b"x")
    assert (run / "run-id").read_bytes() == b"x"
    assert cli.run("fork", ["--trust", f"{run}@8", str(tmp_path / "link/inner")]) == 0


def test_a_file_larger_than_any_run_writes_is_refused(run: Path) -> None:
    for name in ("run-id", "ledger/attempt-00001.json", "config.yaml"):
        os.truncate(run / name, 2**40)
        fork = ["fork", "--trust", f"{run}@8", f"{run.parent}/new"]
        verb, *arguments = fork if name == "run-id" else ["report", str(run)]
        assert cli.run(verb, arguments) == USER_ERROR, name
        os.truncate(run / name, 0)


def test_a_trackers_folder_leads_nowhere_else(run: Path, victim: Path) -> None:
    check_tree(str(run / "mlflow"))
    (run / "mlflow/1").mkdir(parents=True)
    (run / "mlflow/1/loss").symlink_to(victim / "keys")
    with pytest.raises(NotPlain, match="is a link"):
        check_tree(str(run / "mlflow"))
