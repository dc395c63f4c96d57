"""A process that was stopped and goes on, as a laptop that slept: told, and counted as what it is."""

import os
import re
import signal
import time

import pytest

from mingpt.observe.ledger import ledger
from mingpt.world.clock import LEAST_PAUSE, PAUSED
from tests.kits.fault_kit import finish, launch
from tests.kits.node_kit import Node, suspend, wait_until
from tests.kits.run_kit import NewRun


@pytest.mark.slow
def test_a_pause_is_told_and_is_no_training(new_run: NewRun) -> None:
    run = new_run("train.log_every=10")
    node = Node(launch(run, "train.max_steps=1000000", "schedule.decay_steps=150"))
    wait_until(lambda: re.search(r"^step +40/", node.output, re.M), "it trains")
    worker = node.workers()[0]
    suspend(worker)
    time.sleep(2 * LEAST_PAUSE)
    os.kill(worker, signal.SIGCONT)
    wait_until(lambda: re.search(r"^this process did not run for \d+ s", node.output, re.M), "it tells of its pause")
    os.kill(node.process.pid, signal.SIGTERM)
    finish(node, 75)
    known = ledger(str(run.dir))
    assert known.seconds[PAUSED] > LEAST_PAUSE
    assert sum(known.groups().values()) == pytest.approx(known.ran)
