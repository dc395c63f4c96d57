"""All checks, in order: the link to the head, this node itself, the other nodes, the run directory, an all-reduce."""

import os
import socket
import time
from functools import cached_property
from typing import Any
from uuid import uuid4

from mingpt.config.schema import Config
from mingpt.errors import FINISHED, UserError
from mingpt.launch.torchrun import Torchrun
from mingpt.preflight import allreduce, compare, machine
from mingpt.preflight.finding import Finding, Level, exit_code, findings_of
from mingpt.preflight.helper import Helper
from mingpt.preflight.links import Echo, probe_all
from mingpt.preflight.meeting import SHORT_SECONDS, Meeting, Refused, Unreached, host, join, plain, why_unreachable
from mingpt.preflight.report import Report
from mingpt.redact import without_secrets
from mingpt.world import network
from mingpt.world.platforms import find_placement

# The limits of the checks after all nodes have come; on good nodes each takes a fraction of it, but torch may have to
# be imported from a busy file server.
LINKS_SECONDS, IMPORT_SECONDS, PLACE_SECONDS = 20, 180, 60
NAME_ADVICE = "correct /etc/hosts or the DNS, or give an address that means the head on every node"
PEERS = 8  # nodes to which each node measures the link


def inspect(node: Torchrun, config: Config, processes: int | None, seconds: float, found: list[Finding]) -> Report:
    """Run the checks, on every node at once; the report is the same on all nodes that have met.

    processes: of this node; None: as many as the platform announces GPUs, or torch sees. seconds: the longest wait for
    the other nodes. found: what this node has found before, for the report of all.
    """
    helper = Helper()
    try:
        inspection = _Inspection(node, config, processes, seconds, helper)
        inspection.mine += found
        return inspection.run()
    finally:
        helper.end()


class _Inspection:
    """The checks of one node, whose findings are collected in `mine`."""

    def __init__(self, node: Torchrun, config: Config, processes: int | None, seconds: float, helper: Helper) -> None:
        self.node, self.config, self.processes = node, config, processes
        self.seconds, self.helper, self.begun = seconds, helper, time.monotonic()
        self.placement = find_placement(os.environ)
        self.name = socket.gethostname()
        self.mine: list[Finding] = []
        self.identity = f"{self.name}-{uuid4().hex[:12]}"
        self.places = [["run.dir", config.run.dir]]
        if not config.snapshot.dir.startswith(config.run.dir.rstrip("/") + "/"):
            self.places.append(["snapshot.dir", config.snapshot.dir])

    def _add(self, level: Level, check: str, text: str, advice: str, node: str = "") -> None:
        self.mine.append(Finding(level, node or self.name, check, text, advice))

    def run(self) -> Report:
        self.helper.send(do="write", places=self.places, name=self.identity, snapshot_dir=self.config.snapshot.dir)
        meeting = Meeting(0, 1)
        try:
            meeting = self._meet()
            return self._joined(meeting)
        except Unreached as error:
            if error.args:
                self._add("unreachable", "nodes", str(error), "see what its log says")
            # Report what this node has found alone.
            report = self._about_me((0, 0), Meeting(self.node.rank or 0, 1))
            self._check_place()
            return Report([report | {"links": []}], self.mine, [], time.monotonic() - self.begun)
        finally:
            self.helper.send(do="clean", places=self.places, name=self.identity)
            self.helper.receive(PLACE_SECONDS)
            meeting.close()

    # --- the link to the head ---

    def _meet(self) -> Meeting:
        node = self.node
        if node.most == 1:
            return Meeting(0, 1)
        try:
            addresses = [plain(str(a[4][0])) for a in socket.getaddrinfo(node.host, None)]
        except OSError as error:
            self._add("problem", "names", f"{node.host}: {error.strerror or error}", NAME_ADVICE)
            raise Unreached from error
        loopback = next((a for a in addresses if network.is_loopback(a)), None)
        head = node.rank == 0 if node.rank is not None else self._is_head(addresses, loopback)
        literal = node.host in (loopback, "localhost")  # fine without a platform: several launchers on one machine
        if loopback and not head and not literal:
            text = f"{node.host}, the head's name, means {loopback} here, which is this node itself"
            self._add("problem", "names", text, NAME_ADVICE)
            raise Unreached
        if literal and (self.placement or "SLURM_JOB_ID" in os.environ):
            self._add("problem", "names", f"{loopback} as the head's address means each node itself", NAME_ADVICE)
            raise Unreached
        return self._host() if head else self._join()

    def _is_head(self, addresses: list[str], loopback: str | None) -> bool:
        """Whether this node is the head, where no rank says so: its name or one of its addresses is the head's."""
        if loopback:
            return self.node.host in (loopback, self.name, socket.getfqdn(), "localhost")
        return any(network.interface_of(address) for address in addresses)

    def _host(self) -> Meeting:
        try:
            return host(self.node.own, self.node.port, self.node.most, self.seconds)
        except OSError as error:
            text = f"port {self.node.port} can't be opened here ({error.strerror or error})"
            self._add("problem", "ports", text, "stop what listens there, or choose another port")
            raise Unreached from error

    def _join(self) -> Meeting:
        node = self.node
        try:
            return join(node.host, node.port, node.rank, node.most, self.seconds)
        except Refused as error:
            self._add("problem", "nodes", str(error), "give the same --nnodes to all nodes")
            raise Unreached from error
        except Unreached as error:
            to_fix, text, advice = why_unreachable(node.host, node.port)
            self._add("problem" if to_fix else "unreachable", "ports", text, advice)
            raise Unreached from error

    # --- this node ---

    def _own_address(self, meeting: Meeting) -> str:
        """The address at which the other nodes have met this one; without a meeting, the routing table's choice."""
        if own := meeting.own_address():
            return own
        try:
            return network.address_towards(self.node.host)
        except OSError:
            return "127.0.0.1"

    def _about_me(self, ports: tuple[int, int], meeting: Meeting) -> dict[str, Any]:
        """What this node sends to the others; findings about this node alone are added to `mine`."""
        own = self._own_address(meeting)
        about = self._import_torch
        facts = machine.facts(self.config, own)
        facts |= {"capability": about.get("capability"), "visible": about.get("devices", [])}
        facts["nccl"] = about.get("nccl_in_torch") or facts["nccl"]
        announced = (self.placement.gpus or 0) if self.placement and self.processes is None else 0
        processes = self.processes or announced or max(1, len(facts["visible"]))
        addresses, environment = [[own, ""]], None
        if self.node.most > 1 and not network.is_loopback(own):
            try:
                environment = network.settings(facts["interface"], os.environ)
                addresses += _by_environment(own)
            except UserError as error:
                self.mine += findings_of(error, self.name, "interface")
        self.mine += machine.findings(self.config, facts, processes)
        seen, there = len(facts["visible"]), len(facts["gpus"])
        if "error" in about:
            self._add("problem", "torch", f"torch can't be imported ({about['error']})", compare.INSTALL)
        elif seen < there and not os.environ.get("CUDA_VISIBLE_DEVICES"):
            text = f"torch sees {seen} of {there} GPUs (driver {facts['driver']}, torch {facts['torch']})"
            self._add("problem", "gpus", text, "install a driver that is new enough for this torch")
        elif announced > seen:
            text = f"{self.placement.platform if self.placement else ''} announces {announced} GPUs, torch sees {seen}"
            self._add("warning", "gpus", text, "training will run on CPUs: see what nvidia-smi says")
        return {
            "rank": meeting.rank,
            "identity": self.identity,
            "facts": facts,
            "processes": processes,
            "addresses": addresses,
            "ports": ports,
            "environment": environment,
            "clock": meeting.clock,
        }

    @cached_property
    def _import_torch(self) -> dict[str, Any]:
        return self.helper.receive(IMPORT_SECONDS)

    @cached_property
    def _written(self) -> dict[str, Any]:
        return self.helper.receive(PLACE_SECONDS)

    def _check_place(self) -> bool:
        """Whether this node can write the run directory and read it back."""
        place = self._written
        if "error" in place:
            text = f"run.dir={without_secrets(self.config.run.dir)}: {place['error']}"
            self._add("problem", "run.dir", text, "look at the network and the address")
        elif place["problems"]:
            self.mine += findings_of(UserError(*place["problems"]), self.name, "run.dir")
        elif place["conditional"] is False:
            text = f"snapshot.dir={without_secrets(self.config.snapshot.dir)}: this store has no conditional put"
            self._add("warning", "run.dir", text, "never start two runs in one run.dir, or choose another store")
        return not place.get("problems", True)

    def _list_place(self) -> list[str] | None:
        """Which nodes' files this node sees in the run directory; None, and a finding, if it can't be listed."""
        self.helper.send(do="list", key="run.dir", url=self.config.run.dir)
        listing = self.helper.receive(PLACE_SECONDS)
        if problems := listing.get("problems", [listing.get("error")]):
            self.mine += findings_of(UserError(*map(str, problems)), self.name, "run.dir")
            return None
        return list(listing["seen"])

    # --- all nodes ---

    def _joined(self, meeting: Meeting) -> Report:
        try:
            return self._together(meeting)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            if not meeting.connections:
                raise
            what = "a message is not from a preflight of this version: a node has other code, or it is no node"
            raise Unreached(f"{what} ({type(error).__name__}: {error})") from error

    def _together(self, meeting: Meeting) -> Report:
        """The report is the same on every node, since each has all values that were gathered."""
        echo = Echo(self.identity)
        me = self._about_me(echo.ports, meeting)
        nodes = {n["rank"]: n for n in meeting.gather(me, IMPORT_SECONDS + SHORT_SECONDS) if n}
        links = self._probe(meeting, nodes)
        written = self._check_place()
        for rank, answer in enumerate(meeting.gather([links, written], LINKS_SECONDS + PLACE_SECONDS)):
            if answer:
                nodes[rank] |= {"links": answer[0], "written": answer[1]}
        seen = self._list_place() if written else None
        findings: list[Finding] = []
        for rank, answer in enumerate(meeting.gather([seen, [vars(f) for f in self.mine]], PLACE_SECONDS)):
            if answer:
                nodes[rank]["seen"] = answer[0]
                findings += [Finding(**f) for f in answer[1]]
        hosts = {rank: n["facts"]["host"] for rank, n in nodes.items()}
        whole = [n for n in nodes.values() if "seen" in n]
        for rank in nodes.keys() - {n["rank"] for n in whole}:
            text = "it ended or stopped answering during preflight"
            findings.append(Finding("unreachable", hosts[rank], "nodes", text, "see what its log says"))
        addresses = self.placement.addresses if self.placement else ()
        findings += compare.absent(meeting.size, self.node.least, hosts, addresses, self.node.port, self.seconds)
        findings += compare.alike([n["facts"] for n in whole]) + compare.links(whole, hosts)
        findings += compare.clocks(whole) + compare.places(whole)
        notes: list[str] = []
        if meeting.size > 1:
            settings = (
                (n["facts"]["host"], " ".join(f"{k}={v}" for k, v in n["environment"].items()))
                for n in whole
                if n["environment"] is not None
            )
            notes = [f"{name} sets {given or 'nothing: all is set'}" for name, given in settings]
            if len(whole) == meeting.size and exit_code(findings) == FINISHED:
                notes += allreduce.measure(self.config, self.helper, meeting, whole, findings)
        return Report(whole, findings, notes, time.monotonic() - self.begun, meeting.rank)

    def _probe(self, meeting: Meeting, nodes: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """Measure the links to the next PEERS nodes by rank: to all in a large job would be too many connections."""
        others = sorted(nodes.keys() - {meeting.rank}, key=lambda rank: (rank - meeting.rank) % meeting.size)[:PEERS]
        wanted = [
            (rank, address, tuple(nodes[rank]["ports"]), nodes[rank]["identity"])
            for rank in others
            for address, _ in nodes[rank]["addresses"]
        ]
        return probe_all(wanted)


def _by_environment(own: str) -> list[list[str]]:
    """The addresses that NCCL and gloo would take because of variables, each with its variable and value."""
    import psutil

    out: list[list[str]] = []
    for variable in (network.GLOO, network.NCCL):
        value = os.environ.get(variable)
        names = network.chosen(variable, value) if value else []
        of_interface = [a.address for a in psutil.net_if_addrs()[names[0]]] if names else []
        kind = ":" in own
        taken = [a for a in of_interface if (":" in a) == kind and a.count(":") != 5]  # 5 colons: a hardware address
        if value and own not in taken:
            out.append([taken[0] if taken else "no address", f"{variable}={value}"])
    return out
