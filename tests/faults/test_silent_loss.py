"""A node whose cable is pulled says nothing, not even that it is gone: what waits for it ends all the same, in time."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fault_kit import at_step, training
from net_kit import Net, hosts, needs_hosts
from node_kit import Node, wait_until
from run_kit import Run

pytestmark = needs_hosts

ADDRESSES = {"a": "10.98.0.11", "b": "10.98.0.12"}


@pytest.fixture
def net() -> Iterator[Net]:
    with hosts(ADDRESSES) as net:
        yield net


STORE = (
    "import torch.distributed as dist, datetime; s = dist.TCPStore('a', 29500, is_master={}, wait_for_workers=False)"
)
SERVER = f"{STORE.format(True)}; print('ready'); import time; time.sleep(3600)"
CLIENT = f"""{STORE.format(False)}
import os, sys, time
from mingpt.world.network import limit_silence
limit_silence(29500, 3)
print("ready")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print("asked at", time.monotonic())
try:
    CALL
except dist.DistNetworkError:
    print("lost at", time.monotonic())
"""


@pytest.mark.parametrize(
    ("call", "cut_first", "within"),
    [
        ('s.compare_set("key", "", "value")', True, 3 + 2),  # has something to send, that is never acknowledged
        # Nothing is under way: the question has arrived, and the answer may come in an hour.
        ('s.wait(["never set"], datetime.timedelta(seconds=3600))', False, 3 + 2),
        # Torch's limit passes, it takes its question back, and waits for that to be confirmed.
        ('s.wait(["never set"], datetime.timedelta(seconds=5))', False, 5 + 2 + 2),
    ],
    ids=["unsent", "unanswered", "taken back"],
)
def test_a_store_that_falls_silent_is_lost_after_the_limit(
    call: str, cut_first: bool, within: float, net: Net, tmp_path: Path
) -> None:
    server = Node([*net.enter("a"), sys.executable, "-c", SERVER])
    wait_until(lambda: "ready\n" in server.lines, "the store listens")
    script, go = CLIENT.replace("CALL", call), tmp_path / "go"
    client = Node([*net.enter("b"), sys.executable, "-c", script, str(go)])

    def told(what: str) -> list[float]:
        return [float(line.split()[-1]) for line in client.lines if line.startswith(what)]

    try:
        wait_until(lambda: "ready\n" in client.lines, "the client is connected")
        if not cut_first:
            go.touch()
            wait_until(lambda: told("asked at"), "it asks")
            time.sleep(1)  # until the question has arrived
        before = time.monotonic()
        net.cut("a")
        after = time.monotonic()
        go.touch()
        assert client.wait() == 0, client.output
        [asked], [lost] = told("asked at"), told("lost at")
        assert lost - before > 1, (asked, before, after, lost)  # both hosts have this machine's clock
        assert lost - max(asked, after) < within, (asked, before, after, lost)
    finally:
        client.kill()
        server.kill()


START, STEP, STOP, HEARTBEAT = 30, 15, 10, 5  # seconds: three settings, and the rendezvous' own interval
LIMITS = (
    f"world.init_timeout_seconds={START}",
    f"world.timeout_seconds={STEP}",
    f"launch.shutdown_timeout_seconds={STOP}",
    "train.max_steps=1000000",
)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_head_that_falls_silent_ends_the_other_node(backend: str, net: Net, new_run: Callable[..., Run]) -> None:
    run, cut = new_run(), list[float]()

    def pull() -> None:
        if not cut:  # either node may have process 0, which prints the steps
            cut.append(time.monotonic())
            net.cut("a")

    nodes = []
    for rank, host in enumerate(ADDRESSES):
        place = [f"--node-rank={rank}", f"--rdzv-backend={backend}", "--rdzv-endpoint=a:29500", "--rdzv-id=x"]
        options = ["--nnodes=2", "--nproc-per-node=1", *place]
        command = [sys.executable, "-m", "mingpt.launch", *options, *training(run, *LIMITS)]
        nodes.append(Node([*net.enter(host), *command], on_line=at_step(20, pull)))
    try:
        code = nodes[1].wait()
        assert code == 70, nodes[1].output[-6000:]
        # The heartbeat that gets no answer, then the worker that gives up, too; and what a busy machine takes (its line
        # may be read late, so that the worker has begun to wait before the cut). Torch would wait for 300 s.
        assert STEP - 5 < time.monotonic() - cut[0] < HEARTBEAT + STEP + STOP + 100
        said = nodes[1].lines[-1]
        assert said.startswith("launch: exit code 70: lost contact with the node that hosts the rendezvous: "), said
        nodes[1].assert_nothing_left()
    finally:
        for node in nodes:
            node.kill()
