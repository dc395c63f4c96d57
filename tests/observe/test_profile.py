"""profile.steps: a trace that Perfetto opens, its top ten, and the same bits."""

import gzip
import json
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from mingpt.files.folder import Folder
from mingpt.observe import events, profile
from mingpt.observe.events import AttemptEnded, AttemptStarted, StepDone
from mingpt.observe.profile import Profile
from mingpt.snapshot.reader import read_manifest
from mingpt.snapshot.store import Store
from tests.kits.branch_kit import train
from tests.kits.config_kit import problems


def spans(folder: str, name: str) -> list[str]:
    """The numbers of the profiled steps of a Chrome trace."""
    found = json.loads(gzip.decompress(Folder(folder).read(f"{name}.json.gz") or b""))["traceEvents"]
    assert any(event.get("name") == "aten::addmm" for event in found)
    names = {str(e.get("name")) for e in found if e.get("ph") == "X"}
    return sorted(name.removeprefix("ProfilerStep#") for name in names if name.startswith("ProfilerStep#"))


@pytest.mark.slow
def test_a_profile_has_the_steps_that_it_is_asked_for_and_changes_no_bit(
    trained: Path, tmp_path: Path, text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (events, profile):  # on a busy machine as well
        monkeypatch.setattr(module, "END_SECONDS", 240.0)
    train(tmp_path, text, cache, "profile.steps=5:8")
    assert spans(f"{tmp_path}/profile", "attempt-00001-steps-5-8") == ["5", "6", "7"]
    _, head, _, *rows, _, _ = (tmp_path / "profile/attempt-00001-steps-5-8.txt").read_text().rstrip().splitlines()
    assert ("Self CPU" in head, len(rows)) == (True, 10)
    ours, theirs = (read_manifest(Store(f"{run}/snapshots"), 12).digest for run in (tmp_path, trained))
    assert ours == theirs


@pytest.mark.parametrize(
    ("steps", "late", "first", "last", "name", "numbers"),
    [
        ("3:9", 0, 1, 4, "steps-3-9", ["3", "4", "5"]),  # an attempt that ends early stores what it has
        ("2:3", 1, 1, 6, "steps-3-4", ["3"]),  # CUDA: the step gives way whose beginning no event marks
        ("8:9", 1, 1, 6, None, ["profile.steps=8:9: nothing is recorded: this attempt ended after step 6"]),
        ("2:4", 1, 6, 6, None, []),  # these steps were an earlier attempt's
    ],
)
def test_what_is_recorded(steps: str, late: int, first: int, last: int, name: str | None, numbers: list[str]) -> None:
    """late: 1 where each step's event comes when the next step is under way."""
    said, run_dir = list[str](), f"memory://{uuid4().hex}/run"
    observer = Profile(steps, run_dir, 2, cuda=False, say=said.append)
    observer.late = late
    observer.on(AttemptStarted(1, first - 1, last if late else 9, 1, "cuda", "n1"))
    for step in range(first, last + 1):
        torch.nn.Linear(3, 3)(torch.ones(2, 3))
        observer.on(StepDone(step, 1.0, 1.0, (), ()))
        torch.nn.Linear(3, 3)(torch.ones(2, 3))
    observer.on(AttemptEnded(last, False, None))
    assert (spans(f"{run_dir}/profile", f"attempt-00002-{name}") if name else said) == numbers
    assert not name or f"{run_dir}/profile/attempt-00002-{name}.json.gz" in said[0]


@pytest.mark.parametrize("bad", ["7", "7:7", "0:3", "a:b", "3:2:1"])
def test_bad_steps_are_a_problem_of_the_config(bad: str) -> None:
    [problem] = problems(f"profile.steps='{bad}'")
    assert problem.startswith(f"profile.steps={bad}: ")
