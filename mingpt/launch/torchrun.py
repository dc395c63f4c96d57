"""Composes the torchrun command of a node from the options of `mingpt launch` and the platform's variables."""

import errno
import shlex
import signal
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

from mingpt.compose.commandline import given
from mingpt.config.schema import Config
from mingpt.errors import UserError
from mingpt.launch import values
from mingpt.launch.values import Names
from mingpt.world import network
from mingpt.world.env import START
from mingpt.world.lifetime import STOP_SIGNALS
from mingpt.world.platforms import PORT, Placement, find_placement, options_of, resolved
from mingpt.world.secret import C10D, STATIC, check_secret

LAST_PORT = 65535
LOOPBACK = "127.0.0.1"
# Options that mean something with several nodes only.
SEVERAL_NODES_OPTIONS = ("rdzv_endpoint", "rdzv_id", "rdzv_conf", "master_addr", "master_port", "node_rank")


@dataclass(frozen=True)
class Command:
    """torchrun's arguments, and the environment that it needs."""

    arguments: list[str]
    # The config's. The workers get them in an environment variable, since `ps` shows arguments to every user.
    overrides: tuple[str, ...]
    environment: dict[str, str]

    def __str__(self) -> str:
        """The command as a line for a shell."""
        variables = [f"{k}={v}" for k, v in self.environment.items()]
        return shlex.join([*variables, "torchrun", *self.arguments, *self.overrides])


@dataclass(frozen=True)
class Torchrun:
    """The validated arguments of torchrun. Terms are torchrun's."""

    least: int  # number of nodes, at least
    most: int  # number of nodes, at most
    processes: int  # on this node
    backend: str  # of the rendezvous: c10d or static
    host: str  # of the rendezvous' store
    port: int  # of the store; 0 with one node: the system chooses a free one
    rank: int | None  # of this node; None: unknown (c10d does not need it)
    own: str  # this node's address
    option: str  # what sets the port, for messages
    job: str | None  # the rendezvous id; None: run.name
    settings: str  # --rdzv-conf of the user, with a leading comma
    overrides: tuple[str, ...]

    @classmethod
    def compose(cls, options: Namespace, environment: Mapping[str, str]) -> "Torchrun":
        """Read the command line and the platform's variables.

        Raises UserError with all options that are missing or wrong.
        """
        place = find_placement(environment)
        problems: list[str] = []
        if options.max_restarts is not None:
            problems.append(
                "--max-restarts: not supported, since restarts go on as long as attempts leave new snapshots: leave it "
                "out, or set how many may leave none: launch.max_attempts_without_progress"
            )
        # Looked at before variables are added: what a pod's variables say beside one node does no harm.
        of_several = [name for name in SEVERAL_NODES_OPTIONS if getattr(options, name) is not None]
        called = Names()
        if place is None:
            for name, (variable, value) in options_of(environment, vars(options)).items():
                if getattr(options, name) is None:
                    setattr(options, name, value)
                    called[name] = f"environment variable {variable}"
        nodes = options.nnodes or str(len(place.addresses) if place else 1)
        least, most = values.nodes(called["nnodes"], nodes, problems)  # 0 if that is wrong
        rank = values.number(called["node_rank"], options.node_rank, 0, problems, most - 1 if most else None)
        rank = place.rank if rank is None and place else rank
        if options.rdzv_backend not in (None, "c10d", "static"):
            problems.append(f"{called['rdzv_backend']}={options.rdzv_backend}: unknown: choose c10d or static")
        has_rank = options.node_rank is not None or rank is not None
        # Static wherever all is known: it needs no secret, and no pickle travels.
        backend = options.rdzv_backend or ("static" if options.master_addr or (has_rank and least == most) else "c10d")
        host, port, option = _head(options, called, place, backend, most, problems)
        if most == 1:
            backend, rank = "static", 0
            if not place:
                several = "is for several nodes: say how many with --nnodes"
                problems += [f"--{name.replace('_', '-')} {several}" for name in of_several]
        elif most and backend == "static":
            if not has_rank:
                needs = f"a static rendezvous needs {called.missing('node_rank')}, from 0 to {most - 1}"
                problems.append(f"{called['nnodes']}={nodes} with {needs}")
            if least != most:
                problems.append(
                    f"{called['nnodes']}={nodes}: a static rendezvous has one size: use --rdzv-backend=c10d"
                )
        settings = values.settings(called["rdzv_conf"], options.rdzv_conf, most, problems)
        number = None if options.nproc_per_node in ("auto", "gpu") else options.nproc_per_node
        processes = values.number(called["nproc_per_node"], number, 1, problems)
        if problems:
            raise UserError(*problems)
        own = _own(options, called, place, most, host, option)
        if processes is None:
            processes = max(1, _gpus() if place is None or place.gpus is None else place.gpus)
        job = options.rdzv_id or (place.job if place else None)
        return cls(
            least=least, most=most, processes=processes, backend=backend, host=host, port=port, rank=rank, own=own,
            option=called["master_port" if option == "master_addr" else option], job=job, settings=settings,
            overrides=tuple(given(options)),
        )  # fmt: skip

    @property
    def fewest_processes(self) -> int:
        """The least possible number of processes in the world: each other node has at least one."""
        return self.processes + self.least - 1

    def check(self, environment: Mapping[str, str]) -> None:
        """Raise UserError if this node lacks what the rendezvous needs: a secret, or a free port if it hosts."""
        if self.backend == "c10d":
            check_secret(environment)
        if self.port == 0 or self.rank != 0:
            return
        try:
            # Bind without listening: otherwise another node could connect and take this socket for the store.
            network.bind(self.own, self.port, several=True).close()
        except OSError as error:
            what = "is in use on this node: stop what listens there, or choose another"
            if error.errno != errno.EADDRINUSE:  # below 1024, for example
                what = f"can't be listened on: {error.strerror}: choose another"
            raise UserError(f"{self.option}: port {self.port} {what}") from error

    def command(self, config: Config) -> Command:
        wait = int(config.world.init_timeout_seconds)
        nodes = str(self.most) if self.least == self.most else f"{self.least}:{self.most}"
        arguments = [f"--nnodes={nodes}", f"--nproc-per-node={self.processes}"]
        if self.backend == "static":
            conf = f"rank={self.rank},timeout={wait}"
            arguments += [f"--rdzv-backend={STATIC}"]
        else:
            # Without is_host torch compares addresses to find the store's host, which fails behind NAT.
            hosting = "" if self.rank is None else f",is_host={'true' if self.rank == 0 else 'false'}"
            conf = f"join_timeout={wait},read_timeout={wait}{hosting}"
            arguments += [f"--rdzv-backend={C10D}"]
        arguments += [f"--rdzv-endpoint={self.host}:{self.port}", f"--rdzv-id={self.job or config.run.name}"]
        arguments += [f"--rdzv-conf={conf}{self.settings}"]
        signals = [s.name for s in STOP_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
        arguments += [
            f"--local-addr={self.own}",
            f"--max-restarts={config.launch.max_attempts_without_progress - 1}",
            f"--signals-to-handle={','.join(signals)}",
            f"--shutdown-timeout={config.launch.shutdown_timeout_seconds}",
            START,
            "mingpt.train",
        ]
        # A new store for each attempt. With a shared one, the survivors of a lost node would wait for that node.
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": str(config.train.threads)}
        return Command(arguments, self.overrides, environment)


def _head(
    options: Namespace, called: Names, place: Placement | None, backend: str, most: int, problems: list[str]
) -> tuple[str, int, str]:
    """The host and port of the rendezvous' store, and the option that sets the host. Adds to `problems`."""
    if most == 1:
        return LOOPBACK, 0, "master_addr"
    host, number = place.head if place else "", None
    if backend == "static" and (options.master_addr or not options.rdzv_endpoint):
        option, form = "master_addr", ", the address of node 0"
        if options.master_addr:
            host = values.host(options.master_addr)
            if not host:
                problems.append(f"{called[option]}={options.master_addr}: give the name or the address of a host")
        number = values.number(called["master_port"], options.master_port, 1, problems, LAST_PORT)
    else:
        option, form = "rdzv_endpoint", "=HOST:PORT, the address of one node for all"
        if options.rdzv_endpoint:
            host, text = values.endpoint(called[option], options.rdzv_endpoint, problems)
            number = values.number(f"{called[option]}={host}", text, 1, problems, LAST_PORT, ":")
    if most and not host and not getattr(options, option):
        static = " with a static rendezvous" if backend == "static" else ""
        needs = f"{called['nnodes']}={options.nnodes or most}{static} needs {called.missing(option)}{form}"
        why = f": SKYPILOT_NODE_IPS has fewer addresses than SKYPILOT_NUM_NODES={len(place.addresses)}" if place else ""
        problems.append(f"{needs}{why}")
    return host, number or (place.port if place else PORT), option


def _own(options: Namespace, called: Names, place: Placement | None, most: int, host: str, option: str) -> str:
    """This node's address. Raises UserError if no route leads to `host`, that of the rendezvous."""
    if options.local_addr or most == 1:
        return str(options.local_addr or LOOPBACK)
    if place and place.own:
        return _address_for(place, host) or place.own
    if {"master_addr", "rdzv_endpoint"} & called.keys():
        resolved(host, f"{called[option]}=")  # waits: a pod may start before the cluster's DNS knows its name
    return _own_address(host, called[option])


def _own_address(host: str, option: str) -> str:
    """This node's address on the route to `host`, which all nodes know. Raises UserError if there is none."""
    try:
        own = network.address_towards(host)
    except OSError as error:
        raise UserError(
            f"{option}={host}: {error.strerror or error}: give an address that this node can reach"
        ) from error
    # Loopback: `host` is this machine, and its name resolves to 127.0.1.1 here (Debian). On the other nodes the name
    # resolves to an address that they can reach, so the name itself is used.
    return host if network.is_loopback(own) else own


def _address_for(place: Placement, host: str) -> str | None:
    """This node's address on the route to another node, if its own name resolves to loopback here; else None.

    host: of the rendezvous. It serves where the platform names no other node (a Slurm step on one node of a job).
    """
    other = next((address for address in (*place.addresses, host) if address != place.own), None)
    if other is None:
        return None
    try:
        own = network.address_towards(place.own)
        if own == place.own or not network.is_loopback(own):
            return None
        towards = network.address_towards(other)
    except OSError:  # the DNS does not know the name yet
        return None
    return None if network.is_loopback(towards) else towards


def _gpus() -> int:
    import torch  # takes seconds, and is needed only if neither user nor platform gave a number

    return torch.cuda.device_count()
