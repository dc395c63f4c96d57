"""Requests to stop, and people who go away: signals of every kind, closed pipes, a second run on the same directory."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from fault_kit import finish, launch, training
from node_kit import Node, free_port, wait_until
from run_kit import Run

pytestmark = pytest.mark.slow


ALONE = ("--rdzv-backend=static", "--master-addr=127.0.0.1", "--master-port={port}", "--node-rank=1")
HEAD = ("--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=is_host=true")


@pytest.mark.parametrize("place", [ALONE, pytest.param(HEAD, marks=pytest.mark.nightly)], ids=["static", "c10d"])
def test_a_node_that_waits_for_others_can_be_stopped(place: tuple[str, ...], new_run: Callable[..., Run]) -> None:
    options = [option.format(port=free_port()) for option in place]
    node = Node(launch(new_run(), options=("--nnodes=2", "--nproc-per-node=1", *options)))
    wait_until(lambda: "launch: " in node.output, "the command")
    time.sleep(5)  # torch is there, and waits for up to 300 seconds
    os.kill(node.process.pid, signal.SIGTERM)
    finish(node, 75)


def test_a_second_run_on_the_same_directory_ends_the_first(new_run: Callable[..., Run]) -> None:
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


@pytest.mark.nightly
def test_a_closed_terminal_stops_a_run_that_did_not_ask_for_nohup(new_run: Callable[..., Run]) -> None:
    import pty

    run = new_run("train.max_steps=1000000")
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        launch(run), stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
    )  # fmt: skip
    os.close(terminal)
    seen = b""
    while not re.search(rb"step +([5-9][0-9]|[0-9]{3,})/", seen):  # the live display draws some of the steps
        seen = (seen + os.read(main, 4096))[-8192:]
    os.close(main)  # the kernel sends SIGHUP
    assert process.wait(200) == 75
    assert run.store.steps()[0] >= 50
