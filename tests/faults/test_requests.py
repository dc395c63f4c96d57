"""Requests to stop, and people who go away: signals of every kind, closed pipes, a second run on the same directory."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fault_kit import LONG, STEPS, ask_twice, at_step, finish, launch, training
from node_kit import Node, ask_to_stop, free_port, wait_until
from run_kit import Run

pytestmark = pytest.mark.slow

STOPPED = "launch: exit code 75: stopped on request: start the same command again to go on"


def test_many_signals_at_once_are_one_request(new_run: Callable[..., Run]) -> None:
    run = new_run("snapshot.every_steps=0")
    node = Node(launch(run))

    def ask() -> None:
        signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)
        ask_to_stop(node.process.pid, workers=node.workers(), by=signals)

    node.on_line = at_step(50, ask)
    output = finish(node, 75)
    assert output.splitlines()[-1] == STOPPED
    assert 50 <= run.store.steps()[0] < STEPS


def test_a_second_request_ends_a_node_with_a_process_that_will_never_end(new_run: Callable[..., Run]) -> None:
    run = new_run()
    node = Node(launch(run, "launch.shutdown_timeout_seconds=3000"))

    def hang() -> None:
        os.kill(node.workers()[1], signal.SIGSTOP)
        threading.Thread(target=ask_twice, args=(node, signal.SIGINT)).start()

    node.on_line = at_step(50, hang)
    code = node.wait()
    assert code == 70, node.output[-3000:]
    node.assert_nothing_left()


@pytest.mark.parametrize("backend", ["static", "c10d"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_waits_for_others_can_be_stopped(backend: str, rank: int, new_run: Callable[..., Run]) -> None:
    port = free_port()
    place = {
        "static": ("--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={port}", f"--node-rank={rank}"),
        "c10d": (f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={'true' if rank == 0 else 'false'}"),
    }[backend]
    node = Node(launch(new_run(), options=("--nnodes=2", "--nproc-per-node=1", *place)))
    wait_until(lambda: "launch: " in node.output, "the command")
    time.sleep(5)  # torch is there, and waits for up to 300 seconds
    os.kill(node.process.pid, signal.SIGTERM)
    code = node.wait(200)
    assert code == 75, node.output[-3000:]
    assert "stopped on request before" in node.output.splitlines()[-1]
    node.assert_nothing_left()


def test_a_run_whose_output_nobody_reads_any_more_goes_on(
    new_run: Callable[..., Run], undisturbed: Callable[..., Run]
) -> None:
    run = new_run()
    command = ["bash", "-c", '"$@" 2>&1 | head -n 5; exit ${PIPESTATUS[0]}', "bash", *launch(run)]
    finish(Node(command), 0)
    assert run.digest() == undisturbed(*LONG).digest()


def test_a_second_run_on_the_same_directory_ends_the_first(new_run: Callable[..., Run]) -> None:
    run = new_run("train.log_every=10")
    endless = ("train.max_steps=1000000", "schedule.decay_steps=150")
    first = Node(launch(run, *endless))
    wait_until(lambda: re.search(r"^step +40/", first.output, re.M), "the first run trains")
    command = [sys.executable, "-m", "mingpt.train", *training(run, *endless)]
    refused = finish(Node(command), 64)
    assert "resume.take_over=true" in refused
    assert re.search(r"attempt 1 \(\S+, pid \d+, last seen \d+ s ago\)", refused)
    second = Node([*command, "resume.take_over=true"])
    output = finish(first, 64)
    assert re.search(
        r"launch: exit code 64: process \d: run\.dir=.*: attempt 2 has started while this attempt, number 1, was still "
        r"training: this one ends here, and the newer one goes on; two runs need two places",
        output.splitlines()[-1],
    )
    assert re.search(r"^attempt 1 \(.*\) seems to be running: this attempt takes over$", second.output, re.M)
    before = run.store.steps()[0]
    wait_until(lambda: run.store.steps()[0] > before, "the second run goes on")
    os.kill(second.process.pid, signal.SIGTERM)
    finish(second, 75)


def test_a_run_directory_that_is_deleted_is_told(new_run: Callable[..., Run]) -> None:
    run = new_run()
    node = Node([sys.executable, "-m", "mingpt.train", *training(run)])
    node.on_line = at_step(50, lambda: shutil.rmtree(run.dir, ignore_errors=True))
    output = finish(node, 0)
    assert re.search(r"^WARNING: .*attempt-00001\.jsonl was deleted while the run was writing it", output, re.M)
    assert (Path(run.dir) / "metrics/attempt-00001.jsonl").read_text().endswith("\n")
    assert run.store.steps()[0] == STEPS


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
