"""All checks, in order: the link to the head, this node itself, the other nodes, the run directory, an all-reduce."""

import os
import socket
import time
from contextlib import suppress
from functools import cached_property
from typing import Any
from uuid import uuid4

from mingpt.config.schema import Config
from mingpt.errors import FINISHED, UserError
from mingpt.launch.torchrun import Torchrun
from mingpt.preflight import compare, machine, meeting, places
from mingpt.preflight.finding import Finding, Level, Report, exit_code, findings_of
from mingpt.preflight.helper import Helper, Refused, Unreached, answer, or_error
from mingpt.preflight.links import LIMIT, Echo, probe_all, why_unreachable
from mingpt.redact import without_secrets
from mingpt.world import network
from mingpt.world.platforms import find_placement

# The limits of the checks after all nodes have come; on good nodes each takes a fraction of it, but torch may have to
# be imported from a busy file server.
IMPORT_SECONDS, PLACE_SECONDS, REDUCE_SECONDS, SHORT_SECONDS = 180, 60, 30, 10
LINKS_SECONDS = 6 * LIMIT + SHORT_SECONDS
NAME_ADVICE = "correct /etc/hosts or the DNS, or give an address that means the head on every node"
PEERS = 8  # nodes to which each node measures the link


class Inspection:
    """The checks of one node, on every node at once; the report is the same on all nodes that have met.

    processes: of this node; None: as many as the platform announces GPUs, or torch sees. seconds: the longest wait for
    the other nodes. found: what this node has found before. What it finds alone is collected in `mine`.
    """

    def __init__(
        self, node: Torchrun, config: Config, processes: int | None, seconds: float, found: list[Finding]
    ) -> None:
        self.node, self.config, self.processes, self.mine = node, config, processes, [*found]
        self.seconds, self.begun = seconds, time.monotonic()
        self.placement = find_placement(os.environ)
        self.name = socket.gethostname()
        self.identity = f"{self.name}-{uuid4().hex[:12]}"
        self.rank, self.own = node.rank or 0, ""  # own: the address at which the other nodes reach this one
        self.places = [("run.dir", config.run.dir)]
        if not config.snapshot.dir.startswith(config.run.dir.rstrip("/") + "/"):
            self.places.append(("snapshot.dir", config.snapshot.dir))
        self.store, self.files = Helper(), Helper()  # each may hang by itself
        self.importing = self.store.ask(meeting.about)
        self.writing = self.files.ask(places.write, self.places, self.identity, config.snapshot.dir)

    def _add(self, level: Level, check: str, text: str, advice: str, node: str = "") -> None:
        self.mine.append(Finding(level, node or self.name, check, text, advice))

    def run(self) -> Report:
        try:
            self._meet()
            return self._joined()
        except Unreached as error:
            if error.args:
                self._add("unreachable", "nodes", str(error), "see what its log says")
            # Report what this node has found alone.
            report = self._about_me(0)
            self._check_place()
            return Report([report], self.mine, [], time.monotonic() - self.begun)
        finally:
            cleaning = self.files.ask(places.clean, self.places, self.identity)
            with suppress(Unreached):
                answer(cleaning, PLACE_SECONDS)
            self.store.end()
            self.files.end()

    def _gather(self, value: Any, seconds: float) -> list[Any]:
        if self.node.most == 1:
            return [value]
        try:
            asked = self.store.ask(meeting.gather, value, seconds)
            return list(answer(asked, seconds + 2 * meeting.SLACK_SECONDS))
        except (Unreached, OSError) as error:
            raise Unreached(f"the head's preflight has ended or stopped answering ({error})") from error

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
        if "error" in self._torch:
            raise Unreached
        self._open(head)
        self.own = "" if head else network.address_towards(node.host)
        others = [told for told in self._gather([self.identity, self.own], self.seconds) if told]
        mine = [told for told in others if told[0] == self.identity]
        if not mine:
            text = f"another node has the number {self.rank}, or the others had begun before this one came"
            raise Unreached(text)
        if head:
            self.own = next((network.address_towards(address) for _, address in others[1:]), "")

    def _open(self, head: bool) -> None:
        """Host the store, or connect to it."""
        node, own = self.node, self.node.own if head else None
        try:
            arguments = node.host, node.port, own, node.rank, node.most, self.identity, self.seconds
            self.rank = answer(self.store.ask(meeting.meet, *arguments), self.seconds + 2 * meeting.SLACK_SECONDS)
        except Refused as error:
            text, _, advice = str(error).partition(": ")
            self._add("problem", "nodes", text, advice)
            raise Unreached from error
        except (Unreached, OSError) as error:
            if head:
                reason = getattr(error, "strerror", None) or error
                text = f"port {node.port} can't be opened here ({reason})"
                self._add("problem", "ports", text, "stop what listens there, or choose another port")
            else:
                to_fix, text, advice = why_unreachable(node.host, node.port)
                self._add("problem" if to_fix else "unreachable", "ports", text, advice)
            raise Unreached from error

    def _is_head(self, addresses: list[str], loopback: str | None) -> bool:
        """Whether this node is the head, where no rank says so: its name or one of its addresses is the head's."""
        if loopback:
            return self.node.host in (loopback, self.name, socket.getfqdn(), "localhost")
        return any(network.interface_of(address) for address in addresses)

    # --- this node ---

    def _about_me(self, port: int) -> dict[str, Any]:
        """What this node sends to the others; findings about this node alone are added to `mine`."""
        with suppress(OSError):
            self.own = self.own or network.address_towards(self.node.host)
        own, about = self.own or "127.0.0.1", self._torch
        facts = {"capability": None, "visible": [], **machine.facts(self.config, own)}
        facts |= {key: value for key, value in about.items() if value is not None}
        announced = (self.placement.gpus or 0) if self.placement and self.processes is None else 0
        processes = self.processes or announced or max(1, len(facts["visible"]))
        addresses, environment = [[own, ""]], None
        if self.node.most > 1 and not network.is_loopback(own):
            try:
                environment = network.settings(facts["interface"], os.environ)
                addresses += machine.by_environment(own)
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
            "rank": self.rank,
            "identity": self.identity,
            "facts": facts,
            "processes": processes,
            "addresses": addresses,
            "port": port,
            "environment": environment,
        }

    @cached_property
    def _torch(self) -> dict[str, Any]:
        return or_error(self.importing, IMPORT_SECONDS)

    def _check_place(self) -> bool:
        """Whether this node can write the run directory and read it back."""
        place = or_error(self.writing, PLACE_SECONDS)
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
        listing = or_error(self.files.ask(places.see, *self.places[0]), PLACE_SECONDS)
        if problems := listing.get("problems", [listing.get("error")]):
            self.mine += findings_of(UserError(*map(str, problems)), self.name, "run.dir")
            return None
        return list(listing["seen"])

    # --- all nodes ---

    def _joined(self) -> Report:
        try:
            return self._together()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            if self.node.most == 1:
                raise
            what = "a message is not from a preflight of this version: a node has other code"
            raise Unreached(f"{what} ({type(error).__name__}: {error})") from error

    def _together(self) -> Report:
        """The report is the same on every node, since each has all values that were gathered."""
        echo, size = Echo(self.identity), self.node.most
        nodes = {n["rank"]: n for n in self._gather(self._about_me(echo.port), IMPORT_SECONDS) if n}
        clock, links = time.time(), self._probe(nodes)
        written = self._check_place()
        for rank, told in enumerate(self._gather([clock, links, written], LINKS_SECONDS + PLACE_SECONDS)):
            if told:
                nodes[rank] |= dict(zip(("clock", "links", "written"), told, strict=True))
        seen = self._list_place() if written else None
        findings: list[Finding] = []
        for rank, told in enumerate(self._gather([seen, [vars(f) for f in self.mine]], PLACE_SECONDS)):
            if told:
                nodes[rank]["seen"] = told[0]
                findings += [Finding(**f) for f in told[1]]
        hosts = {rank: n["facts"]["host"] for rank, n in nodes.items()}
        whole = [n for n in nodes.values() if "seen" in n]
        for rank in nodes.keys() - {n["rank"] for n in whole}:
            text = "it ended or stopped answering during preflight"
            findings.append(Finding("unreachable", hosts[rank], "nodes", text, "see what its log says"))
        addresses = self.placement.addresses if self.placement else ()
        findings += compare.absent(size, self.node.least, hosts, addresses, self.node.port, self.seconds)
        findings += compare.alike([n["facts"] for n in whole]) + compare.links(whole, hosts)
        findings += compare.clocks(whole) + compare.places(whole)
        notes: list[str] = []
        if size > 1:
            for n in (n for n in whole if n["environment"] is not None):
                given = " ".join(f"{k}={v}" for k, v in n["environment"].items())
                notes.append(f"{n['facts']['host']} sets {given or 'nothing: all is set'}")
            if len(whole) == size and exit_code(findings) == FINISHED:
                notes += self._reduce(whole, findings)
            with suppress(Unreached, OSError):
                answer(self.store.ask(meeting.leave), 2 * meeting.SLACK_SECONDS)
        return Report(whole, findings, notes, time.monotonic() - self.begun, self.rank)

    def _probe(self, nodes: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """Test the links to the next PEERS nodes by rank: to all in a large job would be too many connections."""
        others = sorted(nodes.keys() - {self.rank}, key=lambda rank: (rank - self.rank) % self.node.most)[:PEERS]
        return probe_all(
            [
                (r, address, nodes[r]["port"], nodes[r]["identity"])
                for r in others
                for address, _ in nodes[r]["addresses"]
            ]
        )

    def _reduce(self, nodes: list[dict[str, Any]], findings: list[Finding]) -> list[str]:
        """A line about the speed of an all-reduce; nodes where it failed are added to `findings`."""
        processes, parameters = [n["processes"] for n in nodes], machine.parameters(self.config)
        microbatches = self.config.global_size(sum(processes)) // (self.config.batch.micro_size or 1)
        environment, step = nodes[self.rank]["environment"] or {}, (parameters, microbatches, processes)
        reducing = self.store.ask(meeting.reduce, environment, REDUCE_SECONDS / 2, step)
        results = self._gather(or_error(reducing, REDUCE_SECONDS), REDUCE_SECONDS + SHORT_SECONDS)
        for node, result in zip(nodes, results, strict=True):
            if not result or "error" in result:
                text = f"an all-reduce over gloo failed ({result['error'] if result else 'no answer'})"
                advice = "open all TCP ports between the nodes, and look at the interfaces above"
                findings.append(Finding("problem", node["facts"]["host"], "all-reduce", text, advice))
        if exit_code(findings) != FINISHED:
            return []
        slowest, sent = min(result["bandwidth"] for result in results), results[0]["sent"]
        cost = (
            f"; the exact sum of about {parameters / 1e6:.1f} M gradients sends {sent / 1e6:.0f} MB: "
            f"{sent / slowest:.2f} s of each step, part of it while computing"
        )  # of a model whose size only its own code knows, nothing can be said
        return [f"all-reduce over TCP: {slowest / 1e6:.0f} MB/s from each node{cost if sent else ''}"]
