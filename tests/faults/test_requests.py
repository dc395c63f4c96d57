"""Requests to stop, and people who go away: signals of every kind, closed pipes, a second run on the same directory."""

import os
import re
import signal
import socket
import sys

import pytest

from tests.kits.fault_kit import finish, launch, training
from tests.kits.node_kit import Node, wait_until
from tests.kits.run_kit import NewRun

pytestmark = pytest.mark.slow


def test_a_node_that_waits_for_others_can_be_stopped(new_run: NewRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:  # it waits for up to 300 seconds for an answer of this one
        place = ("--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={head.getsockname()[1]}")
        options = ("--nnodes=2", "--nproc-per-node=1", "--node-rank=1", *place)
        node = Node(launch(new_run(), options=options))
        with head.accept()[0]:
            os.kill(node.process.pid, signal.SIGTERM)
            finish(node, 75)


def test_a_second_run_on_the_same_directory_ends_the_first(new_run: NewRun) -> None:
    run = new_run("train.log_every=10")
    endless = ("train.max_steps=1000000", "schedule.decay_steps=150")
    first = Node(launch(run, *endless))
    wait_until(lambda: re.search(r"^step +40/", first.output, re.M), "the first run trains")
    command = [sys.executable, "-m", "mingpt.train", *training(run, *endless)]
    refused = finish(Node(command), 64)
    assert "resume.take_over=true" in refused
    second = Node([*command, "resume.take_over=true"])
    finish(first, 64)
    assert "attempt 2 " in first.lines[-1]
    assert re.search(r"^attempt 1 \(.*takes over$", second.output, re.M)
    before = run.store.steps()[0]
    wait_until(lambda: run.store.steps()[0] > before, "the second run goes on")
    os.kill(second.process.pid, signal.SIGTERM)
    finish(second, 75)
