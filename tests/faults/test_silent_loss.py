"""A node whose cable is pulled says nothing, not even that it is gone: what waits for it ends all the same, in time."""

import time

import pytest

from tests.kits.fault_kit import at_step, launch
from tests.kits.net_kit import hosts, needs_hosts
from tests.kits.node_kit import Node
from tests.kits.run_kit import NewRun

pytestmark = [needs_hosts, pytest.mark.slow]

# Their own names mean loopback, as Debian has it, and each calls its interface differently. docker0's address is
# reachable from nowhere; it is what NCCL and gloo must not take. Nothing in the commands names an interface.
ADDRESSES = {"a": "10.98.0.11", "b": "10.98.0.12"}
INTERFACES = {"a": "ens1f1", "b": "ens1f0np0"}
DOCKER = ("link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set docker0 up")
START, STEP, STOP, HEARTBEAT = 30, 15, 10, 5  # seconds: three settings, and the rendezvous' own interval
LIMITS = (
    f"world.init_timeout_seconds={START}",
    f"world.timeout_seconds={STEP}",
    f"launch.shutdown_timeout_seconds={STOP}",
    "train.max_steps=1000000",
)


def test_two_hosts_train_until_the_head_falls_silent_which_ends_the_other_node(new_run: NewRun) -> None:
    cut, nodes = list[float](), list[Node]()
    run = new_run()
    with hosts(ADDRESSES, interfaces=INTERFACES, own=dict.fromkeys(ADDRESSES, "127.0.1.1")) as net:

        def pull() -> None:
            if not cut:  # either node may have process 0, which prints the steps
                cut.append(time.monotonic())
                net.cut("a")

        for host in ADDRESSES:
            for words in DOCKER:
                net.run(host, ["ip", *words.split()])
        for rank, host in enumerate(ADDRESSES):
            place = [f"--node-rank={rank}", "--rdzv-backend=c10d", "--rdzv-endpoint=a:29500", "--rdzv-id=x"]
            options = ("--nnodes=2", "--nproc-per-node=1", *place)
            nodes.append(Node([*net.enter(host), *launch(run, *LIMITS, options=options)], on_line=at_step(20, pull)))
        try:
            code = nodes[1].wait()
            assert code == 70, nodes[1].output[-6000:]
            # The heartbeat that gets no answer, then the worker that gives up, too; and what a busy machine takes (its
            # line may be read late, so that the worker has begun to wait before the cut). Torch would wait for 300 s.
            assert STEP - 5 < time.monotonic() - cut[0] < HEARTBEAT + STEP + STOP + 100
            assert "the node that hosts the rendezvous" in nodes[1].lines[-1]
            nodes[1].assert_nothing_left()
        finally:
            for node in nodes:
                node.kill()
