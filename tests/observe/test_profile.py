"""profile.steps: a trace that Perfetto opens, its top ten, and the same bits."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch

from config_kit import problems
from mingpt.observe.events import AttemptEnded, StepComputed
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
        profile.on(StepComputed(step, 1.0, 1.0, (), ()))
        torch.nn.Linear(3, 3)(torch.ones(2, 3))
    profile.on(AttemptEnded(4, False, None))
    stem = "memory://profiled/run/profile/attempt-00002-steps-3-9"
    assert said == [f"profile: {stem}.json.gz, for https://ui.perfetto.dev; its top ten: {stem}.txt"]
    raw = fsspec.filesystem("memory").cat_file(f"{stem}.json.gz")
    assert spans(raw) == ["ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"]


@pytest.mark.parametrize("bad", ["7", "7:7", "0:3", "a:b", "3:2:1"])
def test_bad_steps_are_a_problem_of_the_config(bad: str) -> None:
    told = problems(f"profile.steps='{bad}'")
    assert told == [f"profile.steps={bad}: give FIRST:END: 100:103 are steps 100, 101 and 102"]
