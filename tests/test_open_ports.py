"""Nobody let in: what listens while a run trains, and what a stranger who reaches it can do.

`poison` is the attack: anyone may set the key that torch's c10d rendezvous unpickles. It works against torchrun's own.
"""

import os
import signal
import sys
from collections.abc import Callable

import pytest

from fault_kit import training
from node_kit import Node, wait_until
from run_kit import Run
from stranger_kit import listeners, other_addresses, reachable

ENDLESS = ("train.max_steps=1000000", "schedule.decay_steps=150", "snapshot.every_steps=100000", "train.log_every=10")


def train(node: Node) -> None:
    wait_until(lambda: "step " in node.output or node.process.poll() is not None, "it trains")
    assert node.process.poll() is None, node.output[-3000:]


def stop(*nodes: Node) -> None:
    for node in nodes:
        os.kill(node.process.pid, signal.SIGTERM)
    for node in nodes:
        assert node.wait() == 75, node.output[-3000:]


@pytest.mark.slow
def test_one_node_listens_on_loopback_alone(new_run: Callable[..., Run]) -> None:
    node = Node([sys.executable, "-m", "mingpt.launch", "--nproc-per-node=2", *training(new_run(), *ENDLESS)])
    try:
        train(node)
        at = listeners(node)
        assert at, "the store, and gloo's pairs"
        assert {address for address, _ in at} == {"127.0.0.1"}
        for address in other_addresses("127.0.0.1"):
            assert [port for _, port in at if reachable(address, port)] == []
        stop(node)
    finally:
        node.kill()
