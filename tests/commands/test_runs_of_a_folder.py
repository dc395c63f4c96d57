"""`mingpt log`, `report` and `snapshots list` of a folder: one table of its runs."""

import json
import re
import shutil
import time
from pathlib import Path

import pytest

from mingpt.report.runs import COLUMNS
from tests.kits.report_kit import START, Made, three_attempts
from tests.kits.verb_kit import mingpt

VERBS = ("report runs", "log runs", "snapshots list runs")


def lines_of(verb: str, code: int = 0) -> list[list[str]]:
    """The table that a verb begins with, row by row, without the settings that `report` has behind it."""
    table = mingpt(verb, code=code).split("\n\n")[0].splitlines()
    return [re.split(" {2,}", line)[: len(COLUMNS)] for line in table]


@pytest.fixture(autouse=True)
def runs(here: None) -> None:
    """One that lasted for long, a newer one, and one that has not begun."""
    model = {"kind": "modern", "n_layer": 2}
    three_attempts("runs/a").snapshot(30)
    Made("runs/b").attempt(1, 0, 5, started=START + 90_000, until=START + 90_060, end="failed: " + "no room " * 20)
    Path("runs/b/config.yaml").write_text(json.dumps({"seed": 2, "model": model}))
    Path("runs/c").mkdir()
    Path("runs/c/config.yaml").write_text(json.dumps({"seed": 3, "model": model}))
    Path("runs/notes").mkdir()


def test_three_verbs_show_one_table_the_newest_run_first() -> None:
    found = {verb: lines_of(verb) for verb in VERBS}
    assert found["report runs"] == found["snapshots list runs"] == found["log runs"]
    titles, *rows = found["log runs"]
    assert titles == [*COLUMNS]
    assert [row[0] for row in rows] == ["b", "a", "c"]
    newest, oldest, unborn = (dict(zip(titles, row, strict=True)) for row in rows)
    ended = time.strftime("%Y-%m-%d %H:%M", time.gmtime(START + 90_060))
    assert (newest["date (UTC)"], newest["model"], newest["step"]) == (ended, "modern", "5")
    assert newest["state"].startswith("failed: no room")
    assert len(newest["state"]) < 50
    assert (oldest["state"], oldest["step"], oldest["val_loss"]) == ("finished", "30", "1.5")
    assert (unborn["state"], unborn["date (UTC)"], unborn["step"]) == ("not started", "–", "0")


def test_no_clock_of_a_stranger_puts_a_run_after_now() -> None:
    Made("runs/a").attempt(4, 30, 31, parent=3, until=9e15)
    Made("runs/d").attempt(1, 0, 1, started=-9e15, until=-9e15)
    before = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    dates = {row[0]: row[2] for row in lines_of("log runs")}
    assert before <= dates["a"] <= time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    assert dates["d"] == "–"


def test_log_tells_of_each_run_behind_the_table_and_of_one_run_there_is_none() -> None:
    _, told = mingpt("log runs").split("\n\n")
    assert re.findall(r"^\S.*?: step \d+", told, re.M) == ["b (runs/b): step 5", "made (runs/a): step 30"]
    for words in ("log runs/a", "log runs --graph"):
        assert "val_share" not in mingpt(words)
    for folder in ("runs/notes", "nowhere"):
        mingpt.refused(f"log {folder}")


@pytest.mark.parametrize("link", ["snapshots", "ledger/attempt-00001.json", "elsewhere.json"])
def test_a_run_that_is_refused_is_told_of_once_and_hides_no_other(link: str) -> None:
    path = Path("runs/bad", link)
    shutil.copytree("runs/a", "runs/bad")
    if path.exists():
        path.rename("moved")
    path.symlink_to(Path("moved").absolute())
    for verb, code in (("report runs --out all.html", 0), ("log runs", 0), ("snapshots list runs", link[0] != "l")):
        states = [row[1] for row in lines_of(verb, code) if row[0] in ("a", "bad")]
        assert states == ["finished", "can't be read"]
        assert mingpt.err.count(f"runs/bad/{link} is a link") == 1
        assert "made (runs/a): step 30" in mingpt.out or verb != "log runs"
    assert "<title>2 runs</title>" in Path("all.html").read_text()


def test_a_page_of_runs_that_have_no_figures_is_a_mistake() -> None:
    shutil.rmtree("runs/a")
    shutil.rmtree("runs/b")
    mingpt("report runs --out all.html", code=64)
    assert mingpt.out.splitlines()[1].startswith("c  ")
    assert "error: runs: no run is there" in mingpt.err


def test_a_runs_own_folder_is_no_folder_of_runs() -> None:
    """One without config.yaml, as older ones are: its snapshots folder stands for the run."""
    assert mingpt("report runs/a").splitlines() == ["report: runs/a/report.html"]
