"""Nobody let in: what listens while a run trains, and what a stranger who reaches it can do.

`poison` is the attack: anyone may set the key that torch's c10d rendezvous unpickles.
"""

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from mingpt.world import network, plugins
from mingpt.world.rendezvous import SignedBackend
from mingpt.world.secret import C10D, REFUSED, SECRET, STATIC, take_secret
from tests.kits.fault_kit import launch
from tests.kits.node_kit import Node, free_port, wait_until
from tests.kits.paths_kit import ROOT
from tests.kits.run_kit import NewRun
from tests.kits.stranger_kit import listeners, other_addresses, poison, reachable

ENDLESS = ("train.max_steps=1000000", "schedule.decay_steps=150", "snapshot.every_steps=100000", "train.log_every=10")


@pytest.mark.slow
def test_one_node_listens_on_loopback_alone(new_run: NewRun) -> None:
    node = Node(launch(new_run(), *ENDLESS))
    try:
        wait_until(lambda: "step " in node.output or node.process.poll() is not None, "it trains")
        at = listeners(node)
        assert at, node.output  # the store, and gloo's pairs
        assert {address for address, _ in at} == {"127.0.0.1"}
        for address in other_addresses("127.0.0.1"):
            assert [port for _, port in at if reachable(address, port)] == []
    finally:
        node.kill()


@pytest.mark.slow
def test_several_nodes_run_no_strangers_code(new_run: NewRun, tmp_path: Path) -> None:
    run, port, proof = new_run(), free_port(), tmp_path / "proof"
    nodes: list[Node] = []
    try:
        for rank in (0, 1):
            place = [f"--rdzv-endpoint=127.0.0.1:{port}", f"--node-rank={rank}", f"--local-addr=127.0.0.{rank + 1}"]
            options = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", *place)
            nodes.append(Node(launch(run, *ENDLESS, options=options), {"GLOO_SOCKET_IFNAME": "lo"}))
        wait_until(lambda: any("step " in n.output for n in nodes), "they train")
        at = listeners(nodes[0]) | listeners(nodes[1])
        assert ("127.0.0.1", port) in at
        assert {address for address, _ in at} <= {"127.0.0.1", "127.0.0.2"}
        assert [a for a in other_addresses("127.0.0.1", "127.0.0.2") for _, p in at if reachable(a, p)] == []
        assert poison("127.0.0.1", port, proof)  # from one of the nodes, which nothing keeps out
        # Who has seen it asks its processes to stop, and with them the other node's.
        codes = {node.wait(): node.lines[-1] for node in nodes}
        assert codes.keys() in ({70}, {70, 75}), nodes[0].output + nodes[1].output
        assert codes[70] == f"launch: exit code 70: {REFUSED}\n"
        assert not proof.exists()
    finally:
        for node in nodes:
            node.kill()


# --- what stands before the pickle ---


class Place(RendezvousBackend):
    """A c10d store's key, as everybody can read and write it. A write that knows of an older state comes too late."""

    name = "c10d"
    found: bytes | None = None

    def get_state(self) -> tuple[bytes, Token] | None:
        return None if self.found is None else (self.found, b"token")

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool]:
        self.found = self.found if self.found is not None and token else state
        return self.found, b"token", self.found == state


def test_a_state_without_the_jobs_seal_is_refused() -> None:
    place = Place()
    mine, others = (SignedBackend(place, "one secret", "job 7") for _ in range(2))
    assert mine.get_state() is None
    assert mine.set_state(b"state") == (b"state", b"token", True)
    assert others.get_state() == (b"state", b"token")
    sealed = place.found
    assert sealed
    for secret, job, found in (
        ("another secret", "job 7", sealed),
        ("one secret", "job 8", sealed),  # replayed out of another job
        ("one secret", "job 7", sealed[:-1] + b"x"),
        ("one secret", "job 7", sealed[32:]),
        ("one secret", "job 7", b""),
    ):
        place.found, reader = found, SignedBackend(place, secret, job)
        with pytest.raises(RendezvousStateError):
            reader.get_state()
        with pytest.raises(RendezvousStateError):  # the answer to a write that came too late is read, too
            reader.set_state(b"mine", b"token")


def test_plain_torchrun_knows_our_rendezvous_by_their_entry_points() -> None:
    """As they are in pyproject.toml, whatever is installed."""
    found = re.findall(r'^"?(mingpt-\w+)"? = "(\S+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert {name: resolve_name(path)() for name, path in found} == {STATIC: plugins.static(), C10D: plugins.c10d()}


# --- where a store listens ---


@pytest.mark.parametrize("several", [True, False])
def test_a_store_listens_at_its_address_and_at_no_other(several: bool) -> None:
    port = free_port()  # at 127.0.0.1, which an ephemeral one of 127.0.0.2 need not be
    with network.listen("127.0.0.2", port, several):
        assert reachable("127.0.0.2", port)
        assert not reachable("127.0.0.1", port)
    with network.listen("localhost", 0, several) as s:  # of several nodes, the head may mean itself by it (Kubernetes)
        port = s.getsockname()[1]
        assert next(reachable(a, port) for a in other_addresses("127.0.0.1")) == several


def test_the_workers_do_not_inherit_the_secret() -> None:
    environment = {SECRET: "x" * 16, "HOME": "/"}
    assert take_secret(environment) == "x" * 16
    assert environment == {"HOME": "/"}
