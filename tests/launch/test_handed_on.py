"""What the launcher hands on to its workers, and what a process says before it leaves its world."""

import os
import re
import signal
from pathlib import Path

import pytest

from mingpt.compose import compose
from mingpt.errors import UserError
from mingpt.train.attempt import _launcher_overrides
from mingpt.world.env import Env
from tests.kits.fault_kit import at_step, finish, launch
from tests.kits.node_kit import Node
from tests.kits.run_kit import NewRun


@pytest.mark.slow
def test_restarts_find_the_run_of_the_moment_and_no_command_line_shows_an_override(new_run: NewRun) -> None:
    run = new_run()
    seen: list[str] = []

    def strike() -> None:
        seen.extend(node.processes()[pid] for pid in node.workers())
        os.kill(node.workers()[0], signal.SIGKILL)

    node = Node(launch(run, f"run.dir={run.dir}-${{now:%H%M%S%f}}", options=("--nproc-per-node=2",)))
    node.on_line = at_step(50, strike)
    output = finish(node, 0)
    assert len(re.findall(r"^resumed from step (?:40|60) ", output, re.M)) == 1
    assert len(list(Path(run.dir).parent.glob(f"{Path(run.dir).name}-*"))) == 1
    assert len(seen) == 2
    assert all(re.search(r" -u [^ ]*/mingpt/world/start mingpt\.train $", line) for line in seen), seen


@pytest.mark.parametrize(("agent", "taken"), [(os.getppid(), ["seed=3"]), (1, []), (None, [])])
def test_overrides_in_the_environment_are_taken_from_our_launcher_alone(
    agent: int | None, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not under torchrun's own agent, where an older launch may have left them in a shell."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("MINGPT_OVERRIDES", '["seed=3"]')
    monkeypatch.delenv("MINGPT_AGENT_PID", raising=False)
    if agent:
        monkeypatch.setenv("MINGPT_AGENT_PID", str(agent))
    assert _launcher_overrides(Env.read()) == taken
    assert "MINGPT_OVERRIDES" not in os.environ


def test_what_follows_the_clock_is_found_whatever_the_pattern() -> None:
    compose.refuse_the_time(["seed=3"])
    key = "data.cache_dir=/tmp/${now:%S}"
    assert compose.configure([key])
    with pytest.raises(UserError, match=r"^data\.cache_dir.*now"):
        compose.refuse_the_time([key])
