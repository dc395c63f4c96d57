"""A node whose cable is pulled says nothing, not even that it is gone: what waits for it ends all the same, in time."""

import sys
import time

import pytest

from fault_kit import at_step, training
from net_kit import Net, hosts, needs_hosts
from node_kit import Node
from run_kit import NewRun, Run

pytestmark = [needs_hosts, pytest.mark.slow]

ADDRESSES = {"a": "10.98.0.11", "b": "10.98.0.12"}


START, STEP, STOP, HEARTBEAT = 30, 15, 10, 5  # seconds: three settings, and the rendezvous' own interval
LIMITS = (
    f"world.init_timeout_seconds={START}",
    f"world.timeout_seconds={STEP}",
    f"launch.shutdown_timeout_seconds={STOP}",
    "train.max_steps=1000000",
)


def test_a_head_that_falls_silent_ends_the_other_node(new_run: NewRun) -> None:
    with hosts(ADDRESSES) as net:
        pull_the_cable(net, new_run())


def pull_the_cable(net: Net, run: Run) -> None:
    cut = list[float]()

    def pull() -> None:
        if not cut:  # either node may have process 0, which prints the steps
            cut.append(time.monotonic())
            net.cut("a")

    nodes = []
    for rank, host in enumerate(ADDRESSES):
        place = [f"--node-rank={rank}", "--rdzv-backend=c10d", "--rdzv-endpoint=a:29500", "--rdzv-id=x"]
        options = ["--nnodes=2", "--nproc-per-node=1", *place]
        command = [sys.executable, "-m", "mingpt.launch", *options, *training(run, *LIMITS)]
        nodes.append(Node([*net.enter(host), *command], on_line=at_step(20, pull)))
    try:
        code = nodes[1].wait()
        assert code == 70, nodes[1].output[-6000:]
        # The heartbeat that gets no answer, then the worker that gives up, too; and what a busy machine takes (its line
        # may be read late, so that the worker has begun to wait before the cut). Torch would wait for 300 s.
        assert STEP - 5 < time.monotonic() - cut[0] < HEARTBEAT + STEP + STOP + 100
        assert "the node that hosts the rendezvous" in nodes[1].lines[-1]
        nodes[1].assert_nothing_left()
    finally:
        for node in nodes:
            node.kill()
