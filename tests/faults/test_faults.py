"""The fault matrix: each way to die has a known end. The table that users read is in docs/faults.md.

Two nodes (trees of real processes) train together; something is killed or signalled between two snapshots; where the
run does not go on by itself, both nodes are started again, as a platform would. In the end the digest is that of a run
which nobody disturbed, and at no time is a process left behind.
"""

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from _pytest.mark.structures import ParameterSet

from tests.kits.fault_kit import LAUNCHERS, LONG, STEPS, Cluster
from tests.kits.node_kit import ask_to_stop
from tests.kits.run_kit import NewRun

pytestmark = pytest.mark.slow

WHEN = 50  # the step at which things happen; snapshots are at 40, 60, …
HEAD, OTHER = 0, 1


def signal_one(c: Cluster) -> None:
    other = c.nodes[OTHER]
    ask_to_stop(other.process.pid, workers=other.workers())


def signal_all(c: Cluster) -> None:
    workers = [pid for node in c.nodes for pid in node.workers()]
    ask_to_stop(*(node.process.pid for node in c.nodes), workers=workers, by=(signal.SIGUSR1,))


KILLED = -signal.SIGKILL
# event -> exit codes (head, other) under torchrun and under mingpt.launch, and what the next attempt starts from.
# torchrun knows 0 and 1 only.
EVENTS: dict[str, tuple[Callable[[Cluster], None], tuple[int, int], tuple[int, int], str]] = {
    "a worker is killed": (lambda c: os.kill(c.nodes[OTHER].workers()[0], signal.SIGKILL), (0, 0), (0, 0), "newest"),
    "an agent is killed": (
        lambda c: os.kill(c.nodes[OTHER].process.pid, signal.SIGKILL),
        (1, KILLED),
        (70, KILLED),
        "newest",
    ),
    "a node is lost": (lambda c: c.nodes[OTHER].kill(), (1, KILLED), (70, KILLED), "newest"),
    "the head is lost": (lambda c: c.nodes[HEAD].kill(), (KILLED, 1), (KILLED, 70), "newest"),
    "a signal to one node": (signal_one, (1, 1), (75, 75), "stop"),
    "a signal to all nodes": (signal_all, (1, 1), (75, 75), "stop"),
}


def crossings() -> Iterator[ParameterSet]:
    """Each event under each launcher and rendezvous; all but one of them, by turns, are `nightly`.

    So is a lost node: a lost head takes the same way, and longer.
    """
    for row, event in enumerate(EVENTS):
        for turn, launcher in enumerate(LAUNCHERS):
            others = (row + turn) % len(LAUNCHERS) != 2 or event == "a node is lost"  # the first is under mingpt.launch
            yield pytest.param(event, launcher, marks=[pytest.mark.nightly] * others, id=f"{event}-{launcher}")


@pytest.mark.parametrize(("event", "launcher"), list(crossings()))
def test_fault(event: str, launcher: str, new_run: NewRun, undisturbed: NewRun) -> None:
    strike, under_torchrun, under_launch, resume = EVENTS[event]
    run = new_run()
    processes = (1, 2) if event == "a worker is killed" else (1, 1)
    cluster = Cluster(launcher, run, processes, meet_seconds=60 if KILLED in under_launch else 120)
    struck: list[int] = []

    def on_step(step: int) -> None:
        if step >= WHEN and not struck:
            struck.append(step)
            strike(cluster)

    cluster.on_step = on_step
    cluster.start()
    codes = cluster.wait()
    print(cluster.output[-6000:])
    assert struck, "the run ended before its fault"
    assert codes == (under_launch if launcher.startswith("mingpt.launch") else under_torchrun)
    stopped_at = run.store.steps()[0]
    if codes != (0, 0):
        if resume == "stop":
            assert struck[0] <= stopped_at < STEPS, "no snapshot at the stop"
            assert stopped_at % 20 or f"step {stopped_at}: snapshot" in cluster.output
        else:
            assert stopped_at % 20 == 0
        cluster = Cluster(launcher, run)
        cluster.start()
        assert cluster.wait() == (0, 0), cluster.output[-6000:]
        assert cluster.resumed_from() == [stopped_at]
    else:
        assert len(cluster.resumed_from()) == 1
        assert cluster.resumed_from()[0] in range(40, STEPS, 20)
    assert run.digest() == undisturbed(*LONG).digest()
