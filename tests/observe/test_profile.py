"""profile.steps: a trace that Perfetto opens, its top ten, and the same bits."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch

from config_kit import problems
from mingpt.observe.events import AttemptEnded, AttemptStarted, StepDone
from mingpt.observe.profile import Profile
from run_kit import Run


def spans(raw: bytes) -> list[str]:
    """The names of the profiled steps of a Chrome trace."""
    events = json.loads(gzip.decompress(raw))["traceEvents"]
    assert any(event.get("name") == "aten::addmm" for event in events)
    return sorted({e["name"] for e in events if e.get("ph") == "X" and str(e.get("name")).startswith("ProfilerStep#")})


def test_a_profile_has_the_steps_that_it_is_asked_for_and_changes_no_bit(
    new_run: Callable[..., Run], undisturbed: Callable[..., Run]
) -> None:
    run = new_run("train.max_steps=12", "profile.steps=5:8")
    output = run.finish(1)
    stem = f"{run.dir}/profile/attempt-00001-steps-5-8"
    assert f"profile: {stem}.json.gz, for https://ui.perfetto.dev; its top ten: {stem}.txt\n" in output
    assert spans(Path(f"{stem}.json.gz").read_bytes()) == [f"ProfilerStep#{n}" for n in (5, 6, 7)]
    _, head, _, *rows, _, _ = Path(f"{stem}.txt").read_text().rstrip().splitlines()
    assert "Self CPU" in head
    assert len(rows) == 10
    assert run.digest() == undisturbed("train.max_steps=12").digest()


def test_an_attempt_that_ends_early_stores_what_it_has_also_in_a_bucket() -> None:
    said: list[str] = []
    profile = Profile("3:9", "memory://profiled/run", 2, cuda=False, say=said.append)
    for step in (1, 2, 3, 4):
        profile.on(StepDone(step, 1.0, 1.0, (), ()))
        torch.nn.Linear(3, 3)(torch.ones(2, 3))
    profile.on(AttemptEnded(4, False, None))
    stem = "memory://profiled/run/profile/attempt-00002-steps-3-9"
    assert said == [f"profile: {stem}.json.gz, for https://ui.perfetto.dev; its top ten: {stem}.txt"]
    raw = fsspec.filesystem("memory").cat_file(f"{stem}.json.gz")
    assert spans(raw) == ["ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"]


def on_cuda(steps: str, run_dir: str, start: int, last: int) -> list[str]:
    """What a profile says where each step's event comes when the next step is under way."""
    said: list[str] = []
    profile = Profile(steps, run_dir, 1, cuda=False, say=said.append)
    profile.late = 1
    profile.on(AttemptStarted(1, start, last, 1, "cuda", "n1"))
    for step in range(start + 1, last + 1):
        torch.nn.Linear(3, 3)(torch.ones(2, 3))
        profile.on(StepDone(step, 1.0, 1.0, (), ()))
    profile.on(AttemptEnded(last, True, None))
    return said


def test_on_cuda_a_step_whose_beginning_no_event_marks_gives_way_to_the_next(tmp_path: Path) -> None:
    [said] = on_cuda("2:3", str(tmp_path), 0, 6)
    stem = f"{tmp_path}/profile/attempt-00001-steps-3-4"
    assert said == f"profile: {stem}.json.gz, for https://ui.perfetto.dev; its top ten: {stem}.txt"
    assert spans(Path(f"{stem}.json.gz").read_bytes()) == ["ProfilerStep#3"]


def test_an_attempt_that_could_record_nothing_says_so_once(tmp_path: Path) -> None:
    nothing = "profile.steps=8:9: nothing is recorded: this attempt ended after step 6"
    assert on_cuda("8:9", str(tmp_path), 0, 6) == [nothing]
    assert on_cuda("2:4", str(tmp_path), 5, 6) == []  # these steps were an earlier attempt's


@pytest.mark.parametrize("bad", ["7", "7:7", "0:3", "a:b", "3:2:1"])
def test_bad_steps_are_a_problem_of_the_config(bad: str) -> None:
    told = problems(f"profile.steps='{bad}'")
    assert told == [f"profile.steps={bad}: give FIRST:END: 100:103 are steps 100, 101 and 102"]
