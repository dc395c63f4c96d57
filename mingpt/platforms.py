"""Where this node stands among the nodes of its job, as the platform's environment variables tell it."""

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from mingpt import slurm as slurm_job
from mingpt.errors import Mistake

PORT = 29500  # torchrun's own default
NAMES_SECONDS = 60  # a platform may tell a container's name to its DNS some time after its start


@dataclass(frozen=True)
class Placement:
    """One node's place: all that a torchrun command needs to know of the others."""

    platform: str
    addresses: tuple[str, ...]  # one a node, the head's first
    rank: int  # this node's place in `addresses`
    gpus: int | None  # of this node; None: the platform does not say
    job: str  # the same on all nodes and after a recovery, different for every job
    port: int = PORT  # of the head, unless the user says another

    @property
    def head(self) -> str:
        return self.addresses[0]

    @property
    def own(self) -> str:
        return self.addresses[self.rank]


def skypilot(environment: Mapping[str, str]) -> Placement | None:
    """SkyPilot's distributed-job variables; None outside of SkyPilot. Raises Mistake if they contradict each other."""
    if "SKYPILOT_NODE_IPS" not in environment:
        return None
    addresses = tuple(environment["SKYPILOT_NODE_IPS"].split())
    try:
        rank = int(environment["SKYPILOT_NODE_RANK"])
        nodes = int(environment.get("SKYPILOT_NUM_NODES", len(addresses)))
        gpus = int(environment.get("SKYPILOT_NUM_GPUS_PER_NODE") or 0)
    except KeyError as error:
        raise Mistake(
            "SKYPILOT_NODE_IPS is set in the environment, but not SKYPILOT_NODE_RANK: set both, or none"
        ) from error
    except ValueError as error:
        raise Mistake(
            f"SkyPilot's variables SKYPILOT_NODE_RANK, SKYPILOT_NUM_NODES, SKYPILOT_NUM_GPUS_PER_NODE: {error}: set "
            f"numbers, or unset SKYPILOT_NODE_IPS"
        ) from error
    if nodes != len(addresses) or not 0 <= rank < nodes:
        raise Mistake(
            f"SkyPilot's variables contradict each other: SKYPILOT_NUM_NODES={nodes}, SKYPILOT_NODE_RANK={rank}, and "
            f"{len(addresses)} addresses in SKYPILOT_NODE_IPS: correct them, or unset SKYPILOT_NODE_IPS"
        )
    return Placement("SkyPilot", addresses, rank, gpus, environment.get("SKYPILOT_TASK_ID", "sky"))


def slurm(environment: Mapping[str, str]) -> Placement | None:
    """The variables that Slurm sets in a step with one task a node; None outside of Slurm."""
    if "SLURM_JOB_NODELIST" not in environment:
        return None
    job = f"Slurm's job {environment.get('SLURM_JOB_ID', '')}"
    addresses = tuple(slurm_job.nodes(environment))
    otherwise = "or unset SLURM_JOB_NODELIST to be on your own"
    started_by_srun = slurm_job.is_task(environment)
    # A batch script runs on one of the job's nodes; salloc's shell on a machine that need not be one of them.
    if not started_by_srun and addresses != (environment.get("SLURMD_NODENAME"),):
        raise Mistake(
            f"this is the shell of {job}, on one machine, and the job's nodes are {', '.join(addresses)}: start it on "
            f"each with `srun --ntasks-per-node=1 python -m mingpt.launch …`, {otherwise}"
        )
    try:
        tasks = int(environment.get("SLURM_NTASKS", 1)) if started_by_srun else 1
        rank, nodes = int(environment["SLURM_NODEID"]), int(environment.get("SLURM_NNODES", len(addresses)))
        gpus = int(environment.get("SLURM_GPUS_ON_NODE") or 0)
    except (KeyError, ValueError) as error:
        raise Mistake(
            f"{job}: SLURM_NTASKS, SLURM_NODEID, SLURM_NNODES, SLURM_GPUS_ON_NODE: {error}: start with srun, "
            f"{otherwise}"
        ) from error
    if nodes != len(addresses) or not 0 <= rank < nodes:
        raise Mistake(
            f"{job}: its variables contradict each other: SLURM_NNODES={nodes}, SLURM_NODEID={rank}, and the nodes "
            f"{', '.join(addresses)}: start with srun, {otherwise}"
        )
    if tasks > nodes:
        raise Mistake(
            f"{job}: srun has started {tasks} tasks on {nodes} nodes, and mingpt.launch is for one a node: give srun "
            f"--ntasks={nodes} --ntasks-per-node=1; or start mingpt.train in place of it, once for each GPU"
        )
    return Placement(
        "Slurm", addresses, rank, gpus, f"slurm-{environment.get('SLURM_JOB_ID')}", slurm_job.port(environment)
    )


def container(environment: Mapping[str, str]) -> Placement | None:
    """The variables of a platform that starts one container a node; None outside of one.

    Node R of job J has the name J-R.SUFFIX. Raises Mistake if variables, names and this machine don't agree.
    """
    if "SING_RANK" not in environment:
        return None
    where, cure = "the container platform's variables", "correct them, or unset SING_RANK"
    try:
        rank, nodes = int(environment["SING_RANK"]), int(environment["SING_WORLD_SIZE"])
        job, suffix = environment["SING_JOB_NAME"], environment["SING_HOSTNAME_SUFFIX"]
        master = environment["SING_MASTER_ADDR"]
    except KeyError as error:
        raise Mistake(f"{where}: SING_RANK is set, but not {error.args[0]}: set all of them, or none") from error
    except ValueError as error:
        raise Mistake(f"{where}: SING_RANK, SING_WORLD_SIZE: {error}: {cure}") from error
    if not 0 <= rank < nodes:
        raise Mistake(f"{where} contradict each other: SING_RANK={rank}, SING_WORLD_SIZE={nodes}: {cure}")
    addresses = tuple(f"{job}-{r}.{suffix}" for r in range(nodes))
    own = environment.get("SING_HOST_ADDR", addresses[rank])
    if own != addresses[rank]:
        raise Mistake(
            f"{where} contradict each other: SING_HOST_ADDR={own}, but node {rank} is {addresses[rank]}: {cure}"
        )
    if not any(map(_is_of_this_machine, ips := _resolved(own))):
        raise Mistake(
            f"SING_RANK={rank}: {own} is {', '.join(ips)}, which is no address of this machine: another container has "
            f"this rank, or its name is out of date"
        )
    if master != addresses[0] and not set(_resolved(master)) & set(_resolved(addresses[0])):
        raise Mistake(
            f"{where} contradict each other: SING_MASTER_ADDR={master} is another machine than node 0, {addresses[0]}: "
            f"{cure}"
        )
    return Placement("the container platform", addresses, rank, None, job)


def _resolved(name: str) -> list[str]:
    deadline = time.monotonic() + NAMES_SECONDS
    while True:
        try:
            return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, PORT, type=socket.SOCK_STREAM)})
        except OSError as error:
            if time.monotonic() > deadline:
                raise Mistake(
                    f"{name}: {error.strerror}, for {NAMES_SECONDS} s: no name server of this machine knows it: look "
                    f"at SING_JOB_NAME and SING_HOSTNAME_SUFFIX, and at the platform's DNS"
                ) from error
            time.sleep(1)


def _is_of_this_machine(ip: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as s:
        try:
            s.bind((ip, 0))
        except OSError:
            return False
    return True


PLATFORMS = (skypilot, slurm, container)


def find_placement(environment: Mapping[str, str]) -> Placement | None:
    """This node's place as the first platform tells it that is there; None on a machine of one's own."""
    return next((p for platform in PLATFORMS if (p := platform(environment))), None)
