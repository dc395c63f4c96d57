"""A node that has only the marker of a run: each verb says on which machine the run is, and that it is not lost."""

from pathlib import Path

import pytest

from mingpt.snapshot.elsewhere import Marker
from tests.kits.told import Told
from tests.kits.verb_kit import mingpt

VERBS = (
    "log runs/x", "report runs/x", "diff runs/x runs/x", "replay runs/x@3", "fork runs/x runs/y", "evaluate runs/x",
    "generate runs/x", "export runs/x out", "snapshots list runs/x", "snapshots list runs/x/snapshots",
    "snapshots verify runs/x", "snapshots show runs/x@3", "snapshots digest runs/x@best", "snapshots prune runs/x",
    "snapshots rewind runs/x@3", "snapshots rewind runs/x --undo",
)  # fmt: skip


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("runs/x").mkdir(parents=True)
    Marker("a" * 32, "node\x1b-b", 2, 1200).write("runs/x")
    return Path("runs/x")


def test_each_verb_says_on_which_machine_the_run_is(marker: Path, told: Told) -> None:
    said = {command: mingpt.refused(command) for command in VERBS}
    assert said == dict.fromkeys(VERBS, said[VERBS[0]])
    told(said[VERBS[0]])
    assert [path.name for path in marker.iterdir()] == ["elsewhere.json"]


def test_a_folder_of_runs_names_the_one_that_is_elsewhere(marker: Path, told: Told) -> None:
    told(mingpt.refused("log runs"))
