"""health.notify: what is posted when, and that nothing is hurt by a server that does not do its part."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mingpt.errors import CRASHED, FINISHED, USER_ERROR
from mingpt.observe.events import AttemptEnded, AttemptFailed, SnapshotLost
from mingpt.observe.notify import Alarms, notify
from mingpt.world.env import AGENT_PID
from tests.kits.config_kit import problems
from tests.kits.fault_kit import at_step, finish, launch
from tests.kits.hook_kit import SECRET, hook
from tests.kits.node_kit import Node
from tests.kits.poison_kit import GUARDED, poison
from tests.kits.run_kit import NewRun

HOOK = "hOoKsEcReT77"


def test_an_attempt_tells_how_it_ended_and_its_address_to_nobody(
    train: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hook() as there:
        monkeypatch.setenv("HOOK", there.url)
        overrides = (*GUARDED, *poison([17, 18, 25, 26]), "run.name=my-run", "health.notify='${oc.env:HOOK}'")
        assert train(*overrides) == CRASHED
        assert train(*overrides, f"health.notify='{there.url}'") == USER_ERROR
        assert train(*overrides, "train.max_steps=22") == FINISHED
    assert there.events() == ["rolled back", "failed", "finished"]
    first, second, _ = there.bodies()
    assert (first["run"], first["attempt"], first["step"], first["host"]) == ("my-run", 1, 19, socket.gethostname())
    assert "step 15" in first["text"]
    assert second["attempt"] == 3
    out, err = capfd.readouterr()
    assert "health.notify=***" in out
    assert HOOK not in out + err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and HOOK.encode() in path.read_bytes()]


@pytest.mark.parametrize("status", [500, 302])
def test_an_answer_that_is_an_error_is_told_once(status: int) -> None:
    said: list[str] = []
    with hook(status) as there:
        alarms = Alarms(there.url, "run", 1, said.append)
        for step in (1, 2):
            alarms.on(SnapshotLost(step, step, "the disk is full"))
        alarms.close()
    assert there.events() == ["snapshot lost"] * 2  # and nothing was posted to where a redirect points
    assert said == [f"health.notify failed: the webhook answered with status {status}. The run goes on."]


def test_a_server_that_is_not_there_is_told_without_its_address(capfd: pytest.CaptureFixture[str]) -> None:
    notify(f"http://127.0.0.1:9{SECRET}", "hang", "rank 5 has not come", run="run")
    out, err = capfd.readouterr()
    assert "health.notify failed" in err
    assert HOOK not in out + err


def test_which_ends_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = AttemptFailed(3, USER_ERROR, "UserError", "gone")
    with hook() as there:
        for event in (AttemptEnded(3, False, "d"), failed, AttemptFailed(3, CRASHED, "RuntimeError", "gone")):
            Alarms(there.url, "run", 1).on(event)
        monkeypatch.setenv(AGENT_PID, "1")  # the launcher tells it
        Alarms(there.url, "run", 1).on(failed)
    assert there.events() == ["stopped", "failed"]


@pytest.mark.parametrize("bad", ["hooks.example.com/x", "ftp://e.com/x", "https://", "https://a b/", "http://h:port/x"])
def test_a_bad_address_is_a_problem_of_the_config(bad: str) -> None:
    [problem] = problems(f"health.notify='{bad}'")
    assert problem.startswith("health.notify=***: ")


@pytest.mark.slow
def test_the_launcher_tells_that_it_gives_up(new_run: NewRun) -> None:
    with hook() as there:
        run = new_run("model.n_head=5", f"health.notify={there.url}")
        assert Node(launch(run)).wait() == USER_ERROR  # before anything started: the terminal has it
        assert there.posts == []
        run = new_run("snapshot.every_steps=0", "launch.max_attempts_without_progress=1", "world.timeout_seconds=20")
        node = Node(launch(run, f"health.notify={there.url}"))
        node.on_line = at_step(1, lambda: os.kill(node.workers()[-1], signal.SIGKILL))
        output = finish(node, CRASHED)
    assert there.events() == ["gave up"]
    assert there.bodies()[0]["text"] in output
    assert HOOK not in output
