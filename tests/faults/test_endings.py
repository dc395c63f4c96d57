"""Endings on one node, under mingpt.launch: what is tried again, what is not, and what outlives nothing."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mingpt.world.lifetime import AGAIN_SECONDS
from tests.kits.fault_kit import LONG, STEPS, at_step, finish, launch
from tests.kits.node_kit import Node, free_port, listening, needs_mount, signals, wait_until
from tests.kits.recipe_kit import HEAD, OTHER, sky_variables
from tests.kits.run_kit import NewRun, Run

pytestmark = pytest.mark.slow


def test_workers_whose_agent_dies_while_they_import_torch_end_too(new_run: NewRun) -> None:
    node = Node(launch(new_run()))
    wait_until(lambda: len(node.workers()) == 2, "two workers")
    os.kill(node.process.pid, signal.SIGKILL)
    node.assert_nothing_left()
    assert not re.search(r"^step ", node.output, re.M)


def takes_sigterm(pid: int) -> bool:
    """Whether a launcher does not hold it back: it does so while it starts workers."""
    return signal.SIGTERM not in signals(pid, "SigBlk")


def test_a_signal_before_the_first_step_ends_at_once_with_75(new_run: NewRun) -> None:
    run = new_run()
    node = Node(launch(run))
    wait_until(lambda: len(node.workers()) == 2, "two workers")
    wait_until(lambda: takes_sigterm(node.process.pid), "the launcher has started them")
    os.kill(node.process.pid, signal.SIGTERM)
    finish(node, 75)
    assert run.store.steps() == []


def everybody(node: Node) -> None:
    """As Slurm and SkyPilot do it; the loader's processes survive it."""
    for pid in node.processes():
        os.kill(pid, signal.SIGUSR1)


def twice(node: Node) -> None:
    """While a process will never end. What follows within AGAIN_SECONDS of the first request is the same one."""
    os.kill(node.workers()[1], signal.SIGSTOP)

    def ask() -> None:
        os.kill(node.process.pid, signal.SIGINT)
        wait_until(lambda: "launch: asked to stop" in node.output, "the first request is seen")
        time.sleep(AGAIN_SECONDS + 0.5)
        os.kill(node.process.pid, signal.SIGINT)

    threading.Thread(target=ask).start()


UNREAD = ("bash", "-c", '"$@" 2>&1 | head -n 5; exit ${PIPESTATUS[0]}', "bash")
# What happens at step 50, to a command with this prefix and these overrides, and how it ends.
EVENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[Node], None], int]] = {
    "all are asked to stop": ((), ("data.workers=2",), everybody, 75),
    "a second request": ((), ("launch.shutdown_timeout_seconds=3000",), twice, 70),
    "the terminal is closed, under nohup": (("nohup",), (), lambda n: os.kill(n.process.pid, signal.SIGHUP), 0),
    "nobody reads the output": (UNREAD, (), lambda n: None, 0),
    "a loader dies": ((), ("data.workers=1",), lambda n: os.kill(n.loaders()[0], signal.SIGKILL), 0),
}


@pytest.mark.parametrize("event", EVENTS)
def test_what_ends_a_run_and_what_does_not(event: str, new_run: NewRun, undisturbed: NewRun) -> None:
    prefix, overrides, act, code = EVENTS[event]
    run = new_run(*overrides)
    node = Node([*prefix, *launch(run)])
    node.on_line = at_step(50, lambda: act(node))
    output = finish(node, code)
    assert output.count("launch: starting again") == output.count("resumed from step ") == (event == "a loader dies")
    if code == 75:
        assert 50 <= run.store.steps()[0] < STEPS
    if code == 0:
        assert run.digest() == undisturbed(*LONG).digest()


@needs_mount
def test_a_disk_that_fills_up_in_mid_snapshot_loses_nothing(
    tmp_path: Path, new_run: NewRun, undisturbed: NewRun
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    run = new_run(name="disk/run")
    aside = tmp_path / "aside"
    # A snapshot takes about 0.2 MiB: the third one does not fit. Then the disk is made larger, and the run goes on.
    script = f"""
        mount -t tmpfs -o size=600k tmpfs {disk}
        "$@"; echo "first: $?"
        ls {disk}/run/snapshots/*/manifest.json
        mount -o remount,size=100m {disk}
        "$@"; echo "second: $?"
        cp -r {disk}/run {aside}
    """
    node = Node(["unshare", "-m", "bash", "-c", script, "bash", *launch(run)])
    output = finish(node, 0)
    before, after = output.split("first: 64\n")
    assert f"snapshot.dir={disk}/run/snapshots: " in before.splitlines()[-1]
    good = re.findall(r"step-0*(\d+)/manifest\.json", after.split("launch:")[0])
    assert f"resumed from step {good[-1]} of " in after
    assert "second: 0\n" in after
    assert Run(str(aside), run.text, run.cache).digest() == undisturbed(*LONG).digest()


@pytest.mark.parametrize("spare", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_world_shrinks_when_a_node_is_lost_and_grows_when_one_comes(spare: bool, new_run: NewRun) -> None:
    """spare: a third node waits already, so it does not shrink."""
    # No validation: it would enter the state at the last step, which differs between the two runs.
    endless = (
        "train.max_steps=1000000",
        "schedule.decay_steps=2000",
        "snapshot.every_steps=100",
        "data.val_fraction=0",
    )
    run = new_run()
    port = free_port()

    def start(rank: int) -> Node:
        # Shorter waits than torch's: for the signs of life of a lost node (a node that is only slow for longer would be
        # taken for lost, too, and two worlds would train), and for others that may still join.
        waits = "keep_alive_interval=1,keep_alive_max_attempt=20,last_call_timeout=2"
        waits += f",is_host={str(rank == 0).lower()}" * spare
        place = (f"--rdzv-endpoint={HEAD}:{port}", f"--local-addr=127.0.0.{rank + 1}", f"--rdzv-conf={waits}")
        size = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=x") if spare else ("--nnodes=1:2",)
        there = "\n".join((HEAD, OTHER)[: rank + 1])
        environment = {"MINGPT_RDZV_SECRET": "5" * 32} if spare else {**sky_variables(rank), "SKYPILOT_NODE_IPS": there}
        return Node(launch(run, *endless, "train.log_every=10", options=(*size, *place)), environment)

    def worlds(*nodes: Node) -> list[int]:
        """The sizes of the attempts, in order."""
        lines = re.findall(r"^attempt (\d+): .* (\d) process(?:es)? on ", "".join(node.output for node in nodes), re.M)
        return [int(size) for _, size in sorted(lines, key=lambda line: int(line[0]))]

    head = start(0)
    wait_until(lambda: listening(port), "the store listens")
    lost = start(1)
    wait_until(lambda: 2 in worlds(head, lost) and run.store.steps(), "two nodes train")
    if spare:
        new = start(2)
        wait_until(lambda: "torchrun --nnodes=2" in new.output, "it waits")
    lost.kill()
    if not spare:
        wait_until(lambda: worlds(head, lost)[-1] == 1, "one node goes on")
        new = start(1)
    wait_until(lambda: worlds(head, lost, new)[-1:] == [2] != worlds(head, lost, new), "two nodes train again")
    before = run.store.steps()[0]
    wait_until(lambda: run.store.steps()[0] > before, "a snapshot of the new world")
    for node in (head, new):
        os.kill(node.process.pid, signal.SIGTERM)
    finish(head, 75)
    finish(new, 75)
    undisturbed = new_run(name="undisturbed")
    overrides = (*LONG, *endless, f"train.max_steps={run.store.steps()[0]}", "snapshot.every_steps=0")
    undisturbed.finish(1, *overrides, "train.log_every=1000")
    assert run.digest() == undisturbed.digest()
