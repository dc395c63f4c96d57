"""A process that is gone is noticed within seconds, though nobody waits for a message from it."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from mingpt.world.peers import GRACE_SECONDS
from tests.kits.node_kit import Node, free_port, wait_until
from tests.kits.own_kit import own_run

WORLD = 3


@pytest.mark.slow
def test_processes_that_wait_for_their_device_end_soon_after_another_one(tmp_path: Path) -> None:
    """Without a launcher, which would end the others itself."""
    run = own_run(tmp_path / "run", "Sleeping")
    common = {**run.env, "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    nodes = [Node(run.command(1), {**common, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(WORLD)]
    try:
        asleep = lambda node: "asleep" in node.output or node.process.poll() is not None  # noqa: E731
        wait_until(lambda: all(map(asleep, nodes)), "all are asleep")
        assert [node.process.poll() for node in nodes] == [None] * WORLD, [node.output for node in nodes]
        os.kill(nodes[1].process.pid, signal.SIGSTOP)  # a process that does not answer is no reason: it may go on
        time.sleep(GRACE_SECONDS + 2)
        assert [node.process.poll() for node in nodes] == [None] * WORLD
        os.kill(nodes[1].process.pid, signal.SIGCONT)
        began = time.monotonic()
        os.kill(nodes[2].process.pid, signal.SIGKILL)
        codes = [node.wait() for node in nodes]
        assert time.monotonic() - began < GRACE_SECONDS + 60  # NCCL would take 300
    finally:
        for node in nodes:
            node.kill()
    assert codes == [70, 70, -signal.SIGKILL]
    for rank in (0, 1):
        assert re.findall(rf"error: rank {rank}: .*: process (\d) has", nodes[rank].output) == ["2"]
