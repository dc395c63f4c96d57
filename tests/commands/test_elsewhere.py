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


def test_each_verb_says_on_which_machine_the_run_is_and_a_folder_of_runs_which_one(told: Told) -> None:
    Path("runs/x").mkdir(parents=True)
    Marker("a" * 32, "node\x1b-b", 2, 1200).write("runs/x")
    said = {command: mingpt.refused(command) for command in VERBS}
    assert said == dict.fromkeys(VERBS, said[VERBS[0]])
    told(said[VERBS[0]])
    assert [path.name for path in Path("runs/x").iterdir()] == ["elsewhere.json"]
    told(mingpt.refused("log runs"))


# Of a copy that was brought here before the run went on elsewhere.
OF_A_COPY = (
    "log .", "snapshots list .", "log base", "report base", "diff base base", "export base out",
    "fork base new data.path={text}", "replay base@9 data.path={text}", "evaluate base data.path={text}",
    "generate base --tokens 1", "generate base@best --tokens 1", "snapshots list base",
    "snapshots list base/snapshots --json", "snapshots verify base", "snapshots show base@8", "snapshots digest base",
    "snapshots prune base --dry-run", "snapshots rewind base@8", "snapshots rewind base --undo",
)  # fmt: skip


def test_each_verb_that_shows_an_older_copy_says_once_where_the_newer_one_is(
    base: Path, text: Path, told: Told
) -> None:
    said = dict[str, list[str]]()
    for number, command in enumerate(OF_A_COPY):
        # Each on a machine of its own: a line is said once in a process.
        Marker("a" * 32, f"node-{number}", 2, 1200).write("base")
        mingpt(command.format(text=text))
        said[command] = [line for line in mingpt.err.splitlines() if f"node-{number}'s disk" in line]
    assert {command: len(lines) for command, lines in said.items()} == dict.fromkeys(OF_A_COPY, 1)
    told(said["log base"][0])


@pytest.mark.parametrize(
    ("attempt", "step", "older"), [(1, 12, False), (1, 8, False), (1, 13, True), (2, 8, True)]
)  # (2, 8): the run has gone back there
def test_a_copy_is_older_if_its_attempt_or_its_step_is(base: Path, attempt: int, step: int, older: bool) -> None:
    Marker("a" * 32, f"at-{attempt}-{step}", attempt, step).write("base")
    mingpt("snapshots list base")
    assert (f"at-{attempt}-{step}'s disk" in mingpt.err) == older
