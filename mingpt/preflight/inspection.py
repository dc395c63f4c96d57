"""All checks, in order: the link to the head, this node itself, the other nodes, the run directory, an all-reduce."""

import os
import socket
import time
from contextlib import suppress
from functools import cached_property
from multiprocessing.pool import AsyncResult
from typing import Any
from uuid import uuid4

from pydantic import TypeAdapter

from mingpt.config.schema import Config
from mingpt.errors import FINISHED, TransientError, UserError
from mingpt.files.storage import names_a_disk
from mingpt.launch.torchrun import Torchrun
from mingpt.preflight import compare, links, machine, meeting, places
from mingpt.preflight.finding import Finding, Level, Report, exit_code, findings_of
from mingpt.preflight.helper import Helper, Unreached, answer
from mingpt.preflight.links import LIMIT, Echo
from mingpt.preflight.messages import FINDINGS, MET, NODES, PLACES, RESULTS, T, read
from mingpt.world import network
from mingpt.world.platforms import find_placement

Node = dict[str, Any]  # what a node has sent

# The limits of the checks after all nodes have come; on good nodes each takes a fraction of it, but torch may have to
# be imported from a busy file server.
IMPORT_SECONDS, PLACE_SECONDS, REDUCE_SECONDS, SHORT_SECONDS = 180, 60, 30, 10
FABRIC_SECONDS = 60  # for NCCL's start and its all-reduces
LINKS_SECONDS = 6 * LIMIT + SHORT_SECONDS
NAME_ADVICE = "correct /etc/hosts or the DNS, or give an address that means the head on every node"
PEERS = 8  # nodes to which each node measures the link


class Inspection:
    """The checks of one node, on every node at once; the report is the same on all nodes that have met."""

    def __init__(self, node: Torchrun, config: Config, processes: int | None, seconds: float) -> None:
        """processes: of this node; None: as many as the platform announces GPUs, or torch sees.

        seconds: the longest wait for the other nodes.
        """
        self.node, self.config, self.processes = node, config, processes
        self.own_findings = list[Finding]()  # what this node finds alone
        self.seconds = seconds
        self.begun = time.monotonic()
        self.placement = find_placement(os.environ)
        self.name = socket.gethostname()
        self.identity = f"{self.name}-{uuid4().hex[:12]}"  # two nodes may have one name
        self.rank = node.rank or 0
        self.own = ""  # the address at which the other nodes reach this one
        self.places = [("run.dir", config.run.dir)]
        if not config.snapshot.dir.startswith(config.run.dir.rstrip("/") + "/"):
            self.places.append(("snapshot.dir", config.snapshot.dir))
        self.store, self.files = Helper(), Helper()  # each may hang by itself
        # Asked first: torch may have to be imported from a busy file server, and a store's client be made.
        self.importing = self.store.ask(meeting.about)
        self.writing = self.files.ask(places.write, self.places, self.identity, config.snapshot.dir)

    def _add(self, level: Level, check: str, text: str, advice: str) -> None:
        self.own_findings.append(Finding(level, self.name, check, text, advice))

    def _report(self, nodes: list[Node], findings: list[Finding], notes: list[str]) -> Report:
        return Report(nodes, findings, notes, time.monotonic() - self.begun, self.name, self.rank)

    def run(self) -> Report:
        try:
            self._meet()
            return self._together()
        except Unreached as error:
            if error.args:
                self._add("unreachable", "nodes", str(error), "see what its log says")
            # Report what this node has found alone.
            self.rank, about = 0, self._about_me(0)
            self._check_place()
            return self._report([about], self.own_findings, [])
        finally:
            cleaning = self.files.ask(places.clean, self.places, self.identity)
            with suppress(Unreached):
                answer(cleaning, PLACE_SECONDS)
            self.store.end()
            self.files.end()

    def _gather(self, shape: TypeAdapter[list[T]], value: Any, seconds: float) -> list[T]:
        answers = [value]
        if self.node.most > 1:
            try:
                asked = self.store.ask(meeting.gather, value, seconds)
                answers = answer(asked, seconds + 2 * meeting.SLACK_SECONDS)
            except (Unreached, OSError) as error:
                raise Unreached(f"the head's preflight has ended or stopped answering ({error})") from error
        return read(shape, answers, self.node.most)

    # --- the link to the head ---

    def _meet(self) -> None:
        node = self.node
        if node.most == 1:
            return
        try:
            addresses = [str(a[4][0]) for a in socket.getaddrinfo(node.host, None)]
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
        if self._torch is None:
            raise Unreached
        self._open(head)
        self.own = "" if head else network.address_towards(node.host)
        met = list(filter(None, self._gather(MET, [self.identity, self.own], self.seconds)))
        if all(identity != self.identity for identity, _ in met):
            text = f"another node has the number {self.rank}, or the others had begun before this one came"
            raise Unreached(text)
        # The head's name may mean loopback there; the way to any other node shows its own address.
        if head and len(met) > 1:
            self.own = network.address_towards(met[1][1])

    def _open(self, head: bool) -> None:
        """Host the store, or connect to it."""
        node, own = self.node, self.node.own if head else None
        try:
            asked = self.store.ask(meeting.meet, node.host, node.port, own, node.rank, node.most, self.seconds)
            self.rank = answer(asked, self.seconds + 2 * meeting.SLACK_SECONDS)
        except UserError as error:
            self.own_findings += findings_of(error, self.name, "nodes")
            raise Unreached from error
        except (Unreached, OSError) as error:
            if head:
                reason = getattr(error, "strerror", None) or error
                text = f"port {node.port} can't be opened here ({reason})"
                self._add("problem", "ports", text, "stop what listens there, or choose another port")
            else:
                self.own_findings.append(links.why_unreachable(node.host, node.port, self.name))
            raise Unreached from error

    def _is_head(self, addresses: list[str], loopback: str | None) -> bool:
        """Whether this node is the head, where no rank says so: its name or one of its addresses is the head's."""
        if loopback:
            return self.node.host in (loopback, self.name, socket.getfqdn(), "localhost")
        return any(network.interface_of(address) for address in addresses)

    # --- this node ---

    def _about_me(self, port: int) -> Node:
        """What this node sends to the others; findings about this node alone are added to `own_findings`."""
        with suppress(OSError):
            self.own = self.own or network.address_towards(self.node.host)
        own = self.own or "127.0.0.1"
        without_torch: Node = {"capability": None, "nccl": None, "visible": []}
        facts = without_torch | machine.facts(self.config, own) | (self._torch or {})
        announced = (self.placement.gpus or 0) if self.placement and self.processes is None else 0
        processes = self.processes or announced or max(1, len(facts["visible"]))
        addresses, environment = [[own, ""]], None
        if self.node.most > 1 and not network.is_loopback(own):
            try:
                environment = network.settings(facts["interface"], os.environ)
                addresses += machine.by_environment(own)
            except UserError as error:
                self.own_findings += findings_of(error, self.name, "interface")
        self.own_findings += machine.findings(self.config, facts, processes)
        seen = len(facts["visible"])
        present = len(facts["gpus"])
        if seen < present and not os.environ.get("CUDA_VISIBLE_DEVICES"):
            text = f"torch sees {seen} of {present} GPUs (driver {facts['driver']}, torch {facts['torch']})"
            self._add("problem", "gpus", text, "install a driver that is new enough for this torch")
        elif announced > seen:
            text = f"{self.placement.platform if self.placement else ''} announces {announced} GPUs, torch sees {seen}"
            self._add("warning", "gpus", text, "training will run on CPUs: see what nvidia-smi says")
        return {
            "rank": self.rank,
            "identity": self.identity,
            "facts": facts,
            "processes": processes,
            "addresses": addresses,
            "port": port,
            "environment": environment,
        }

    @cached_property
    def _torch(self) -> Node | None:
        try:
            return dict(answer(self.importing, IMPORT_SECONDS))
        except (Unreached, OSError) as error:
            self._add("problem", "torch", f"torch can't be imported ({error})", compare.INSTALL)
            return None

    def _of_place(self, asked: "AsyncResult[Any]") -> Any:
        """What a function of `places` returns; None, and findings, if it fails."""
        try:
            return answer(asked, PLACE_SECONDS)
        except Unreached as error:
            text = f"run.dir={self.config.run.dir}: {error}"
            self._add("problem", "run.dir", text, "look at the network and the address")
        except (UserError, TransientError) as error:
            self.own_findings += findings_of(error, self.name, "run.dir")

    def _check_place(self) -> bool:
        """Whether this node can write the run directory and read it back."""
        conditional = self._of_place(self.writing)
        if conditional is False:
            text = f"snapshot.dir={self.config.snapshot.dir}: this store has no conditional put"
            self._add("warning", "run.dir", text, "never start two runs in one run.dir, or choose another store")
        return conditional is not None

    def _check_seen(self, writers: dict[str, str]) -> None:
        """Whether this node sees what the others wrote into a bucket. writers: host by identity."""
        seen = self._of_place(self.files.ask(places.see, *self.places[0]))
        unseen = [host for identity, host in writers.items() if seen is not None and identity not in seen]
        if unseen:
            advice = "give a bucket that all nodes share"
            self._add("problem", "run.dir", f"what {', '.join(unseen)} wrote into run.dir is not seen here", advice)

    # --- all nodes ---

    def _together(self) -> Report:
        """The report is the same on every node, since each has all findings that were gathered."""
        echo = Echo(self.identity)
        about = self._gather(NODES, self._about_me(echo.port), IMPORT_SECONDS)
        nodes = [node.model_dump() | {"rank": rank} for rank, node in enumerate(about) if node]
        clock, head = time.time(), nodes[0]["facts"]["host"]
        # Test the links to the next PEERS nodes by rank: to all in a large job would be too many connections.
        peers = sorted(nodes, key=lambda node: (node["rank"] - self.rank) % self.node.most)[1 : PEERS + 1]
        self.own_findings += links.findings(self.name, peers)
        keepers, notes = self._check_run_dir(clock, [node["facts"]["host"] for node in nodes])
        gathered = self._gather(FINDINGS, [vars(finding) for finding in self.own_findings], PLACE_SECONDS)
        findings, answered = compare.of_all(nodes, gathered, keepers)
        missing = sorted({*range(self.node.most)} - {node["rank"] for node in nodes})
        # With fewer nodes than the least, training would wait for them; with more, it begins without them.
        level: Level = "unreachable" if len(nodes) < self.node.least else "warning"
        addresses = self.placement.addresses if self.placement else ()
        findings += compare.absent(missing, level, addresses, head, self.node.port, self.seconds)
        if self.node.most > 1:
            for node in answered:
                if node["environment"] is not None:
                    sets = " ".join(f"{k}={v}" for k, v in node["environment"].items())
                    notes.append(f"{node['facts']['host']} sets {sets or 'nothing: all is set'}")
            # The all-reduces are last and only where all else is fine: what is wrong already would only hang them.
            if len(answered) == self.node.most and exit_code(findings) == FINISHED:
                notes += self._reduce(answered, findings)
                notes += self._measure_fabric(answered, findings)
            with suppress(Unreached, OSError):
                answer(self.store.ask(meeting.leave), 2 * meeting.SLACK_SECONDS)
        return self._report(answered, findings, notes)

    def _check_run_dir(self, clock: float, hosts: list[str]) -> tuple[list[str], list[str]]:
        """Check the run directory, and the clocks, which are sent with it.

        Returns the hosts that will keep snapshots, and what is to be said of that. clock: of this node, when all had
        met. hosts: of the nodes by rank.
        """
        written = self._check_place()
        answered = written if self.writing.ready() else None
        places = self._gather(PLACES, [clock, answered, self.identity, self.name], LINKS_SECONDS + PLACE_SECONDS)
        assert places[0] is not None
        self.own_findings += compare.clock(self.name, places[0][0] - clock, hosts[0])
        if written and not names_a_disk(self.config.run.dir):
            writers = dict[str, str]()
            for place in places:
                if place and place[1]:
                    _, _, identity, host = place
                    writers[identity] = host
            self._check_seen(writers)
        # Where a disk hangs, it would hang as the run is looked for, too.
        if self.node.most == 1 or any(place is None or place[1] is None for place in places):
            return hosts, []
        try:
            asked = self.store.ask(meeting.find_home, self.config, hosts, SHORT_SECONDS)
            keepers, notes = answer(asked, PLACE_SECONDS)
        except (UserError, TransientError) as error:
            if all(place and place[1] for place in places):  # else nodes that can't write have said so
                self.own_findings += findings_of(error, self.name, "run.dir")
            return hosts, []
        return keepers, notes

    def _measure_fabric(self, nodes: list[Node], findings: list[Finding]) -> list[str]:
        """A line about NCCL on each node, where all have GPUs; what is wrong with it is added to `findings`."""
        if self.config.world.backend == "gloo" or not all(node["facts"]["nccl"] for node in nodes):
            return []
        try:
            result = answer(self.store.ask(meeting.reduce_over_nccl), FABRIC_SECONDS)
            results = self._gather(RESULTS, result, FABRIC_SECONDS)
        except (Unreached, OSError) as error:  # nothing comes after this that needs a helper that hangs
            text = f"no all-reduce over NCCL ({error})"
            findings.append(Finding("warning", self.name, "nccl", text, compare.FABRIC))
            return []
        notes = list[str]()
        for node, result in zip(nodes, results, strict=True):
            facts = node["facts"]
            notes.append(f"NCCL on {facts['host']}: {result or 'no answer'}")
            if facts["infiniband"] and "network Socket" in str(result):
                text = f"NCCL takes TCP, and not {', '.join(facts['infiniband'])}"
                findings.append(Finding("warning", facts["host"], "nccl", text, compare.FABRIC))
        return notes

    def _reduce(self, nodes: list[Node], findings: list[Finding]) -> list[str]:
        """A line about the speed of an all-reduce; nodes where it failed are added to `findings`."""
        try:
            environment = nodes[self.rank]["environment"] or {}
            result = answer(self.store.ask(meeting.reduce, environment, REDUCE_SECONDS / 2), REDUCE_SECONDS)
        except (Unreached, OSError) as error:
            result = str(error)
        results = self._gather(RESULTS, result, REDUCE_SECONDS + SHORT_SECONDS)
        advice = "open all TCP ports between the nodes, and look at the interfaces above"
        for node, result in zip(nodes, results, strict=True):
            if not isinstance(result, float):
                text = f"an all-reduce over gloo failed ({result or 'no answer'})"
                findings.append(Finding("problem", node["facts"]["host"], "all-reduce", text, advice))
        if exit_code(findings) != FINISHED:
            return []
        return [f"all-reduce over TCP: {float(results[0] or 0) / 1e6:.0f} MB/s from each node"]
