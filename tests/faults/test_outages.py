"""Runs whose store is gone for a while, or for good: real servers, killed and started again under real training."""

import os
import re
import signal
from pathlib import Path

import pytest

from mingpt.history.history import read_metrics
from tests.kits.node_kit import Node
from tests.kits.run_kit import NewRun, Run
from tests.kits.store_kit import Server, Stores

pytestmark = pytest.mark.slow

# Steps without end, so that whatever a test waits for happens under training.
ENDLESS = (
    "train.max_steps=1000000",
    "schedule.decay_steps=1000",  # else that of max_steps
    "data.val_fraction=0",  # the evaluation at an end is in the state, and these runs have no end
    "snapshot.asynchronous=true",
    "snapshot.every_steps=20",
    "snapshot.keep=1000000",
    "snapshot.retry_seconds=0",
)


@pytest.fixture
def server(serve: Stores, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("MINGPT_STORE_SECONDS", "30")  # other work may share the machine
    return serve("proxied")


def test_training_goes_on_while_the_server_is_gone(
    server: Server, text: Path, cache: Path, undisturbed: NewRun
) -> None:
    run = Run(f"{server.url}/run", text, cache, (*ENDLESS, "snapshot.max_failures=1000"))
    seen: list[str] = []

    def act(line: str) -> None:
        if re.match(r"step \d+: snapshot ", line) and not seen:
            server.kill()
            seen.append("killed")
        elif line.startswith("SNAPSHOT FAILED (2 in a row)"):
            server.start()
            seen.append("started")
        elif re.match(r"step \d+: snapshot ", line) and seen == ["killed", "started"]:
            os.kill(node.process.pid, signal.SIGTERM)
            seen.append("stopped")

    node = Node(run.command(1), on_line=act)
    assert node.wait() == 75, node.output[-3000:]
    assert seen == ["killed", "started", "stopped"]
    failed = re.findall(r"^SNAPSHOT FAILED \(\d+ in a row\): the snapshot of step (\d+)", node.output, re.M)
    steps = run.store.steps()
    assert len(failed) >= 2
    assert [step for step in failed if int(step) in steps or int(step) > steps[0]] == []
    assert [row["step"] for row in read_metrics(run.dir)] == list(range(1, steps[0] + 1))
    same = ("schedule.decay_steps=1000", "data.val_fraction=0")
    assert run.digest() == undisturbed(f"train.max_steps={steps[0]}", *same).digest()
