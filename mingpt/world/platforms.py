"""Reads this node's rank and the other nodes' addresses from the platform's environment variables."""

import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mingpt.errors import UserError
from mingpt.world import slurm as slurm_job

Environment = Mapping[str, str]  # a process's variables
Options = dict[str, tuple[str, str]]  # by name: the variable that gives it, and its value

PORT = 29500  # torchrun's own default
SING = ("SING_RANK", "SING_WORLD_SIZE", "SING_JOB_NAME", "SING_HOSTNAME_SUFFIX", "SING_MASTER_ADDR")
NAMES_SECONDS = 60  # limit for name resolution: a container may start before the platform's DNS knows its name


@dataclass(frozen=True)
class Placement:
    """This node's place among the nodes of its job."""

    platform: str  # for messages
    addresses: tuple[str, ...]  # one per node, the head's first; all "": the platform knows some, not which
    rank: int  # this node's index in `addresses`
    gpus: int | None  # on this node; None: the platform does not say
    job: str  # an id: the same on all nodes and after a recovery, different for every job
    port: int = PORT  # default port of the rendezvous on the head

    @property
    def head(self) -> str:
        return self.addresses[0]

    @property
    def own(self) -> str:
        return self.addresses[self.rank]


def _require(where: str, needed: Sequence[str], environment: Environment, others: Sequence[str] = ()) -> None:
    """Raise UserError if some of the `needed` variables are missing or empty.

    others: further variables that announce several nodes, for the message.
    """
    # A node without its variables would train alone, and several such nodes would write into one run.dir.
    missing = [name for name in needed if not environment.get(name, "").strip()]
    if not missing:
        return
    present = list[str]()
    for name in dict.fromkeys((*needed, *others)):
        if environment.get(name, "").strip():
            present.append(name)
    values = ", ".join(f"{name}={environment[name]}" for name in present)
    raise UserError(
        f"{where}: {values} {'is' if len(present) == 1 else 'are'} set in the environment, but not "
        f"{', '.join(missing)}: set all of them, or unset {', '.join(present)} to be on your own"
    )


def _above_one(environment: Environment, *names: str) -> list[str]:
    """The names of the variables that are set to more than one. What is no number may be more than one."""
    return [name for name in names if environment.get(name, "1").strip() not in ("", "0", "1")]


def skypilot(environment: Environment) -> Placement | None:
    """This node's place by SkyPilot's variables; None outside of it. Raises UserError if they contradict each other."""
    needed = ("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK")
    several = _above_one(environment, "SKYPILOT_NUM_NODES")
    if not several and not any(map(environment.get, needed)):
        return None
    _require("SkyPilot's variables", needed, environment, several)
    addresses = tuple(environment["SKYPILOT_NODE_IPS"].split())
    try:
        rank = int(environment["SKYPILOT_NODE_RANK"])
        nodes = int(environment.get("SKYPILOT_NUM_NODES", len(addresses)))
        gpus = int(environment.get("SKYPILOT_NUM_GPUS_PER_NODE") or 0)
    except ValueError as error:
        raise UserError(
            f"SkyPilot's variables SKYPILOT_NODE_RANK, SKYPILOT_NUM_NODES, SKYPILOT_NUM_GPUS_PER_NODE: {error}: set "
            f"numbers, or unset them and SKYPILOT_NODE_IPS"
        ) from error
    if nodes < len(addresses) or not 0 <= rank < nodes:
        raise UserError(
            f"SkyPilot's variables contradict each other: SKYPILOT_NUM_NODES={nodes}, SKYPILOT_NODE_RANK={rank}, and "
            f"{len(addresses)} addresses in SKYPILOT_NODE_IPS: correct them, or unset all three"
        )
    # A dynamic node set (SkyPilot on Kubernetes) names the nodes that have come, and nothing says which numbers they
    # have. Then the user says where the rendezvous is.
    if len(addresses) < nodes:
        addresses = ("",) * nodes
    return Placement("SkyPilot", addresses, rank, gpus, environment.get("SKYPILOT_TASK_ID", "sky"))


def slurm(environment: Environment) -> Placement | None:
    """This node's place by Slurm's variables in a step with one task per node; None outside of Slurm.

    Raises UserError if they contradict each other, or this is not such a step.
    """
    job = f"Slurm's job {environment.get('SLURM_JOB_ID', '')}".rstrip()
    started_by_srun = slurm_job.is_task(environment)
    if "SLURM_JOB_NODELIST" not in environment:
        if started_by_srun and (several := _above_one(environment, "SLURM_NNODES", "SLURM_NTASKS")):
            _require(job, ["SLURM_STEP_ID", "SLURM_JOB_NODELIST"], environment, several)
        return None
    slurm_job.refuse_components(environment)
    addresses = tuple(slurm_job.nodes(environment))
    otherwise = f"or unset SLURM_JOB_NODELIST{' and SLURM_STEP_ID' if started_by_srun else ''} to be on your own"
    # A batch script of a job with one node is that node. salloc's shell may run on a machine outside of the job.
    if not started_by_srun and addresses != (environment.get("SLURMD_NODENAME"),):
        raise UserError(
            f"this is the shell of {job}, on one machine, and the job's nodes are {', '.join(addresses)}: start it on "
            f"each with `srun --ntasks-per-node=1 mingpt launch …`, {otherwise}"
        )
    try:
        rank = int(environment["SLURM_NODEID"])
        nodes = int(environment.get("SLURM_NNODES", len(addresses)))
        tasks = int(environment.get("SLURM_NTASKS", nodes)) if started_by_srun else nodes
        gpus = int(environment.get("SLURM_GPUS_ON_NODE") or 0)
    except (KeyError, ValueError) as error:
        raise UserError(
            f"{job}: SLURM_NTASKS, SLURM_NODEID, SLURM_NNODES, SLURM_GPUS_ON_NODE: {error}: start with srun, "
            f"{otherwise}"
        ) from error
    if nodes != len(addresses) or not 0 <= rank < nodes:
        raise UserError(
            f"{job}: its variables contradict each other: SLURM_NNODES={nodes}, SLURM_NODEID={rank}, and the nodes "
            f"{', '.join(addresses)}: start with srun, {otherwise}"
        )
    if tasks != nodes:  # with fewer, the others would wait for nodes without a task
        raise UserError(
            f"{job}: SLURM_NTASKS={tasks}, SLURM_NNODES={nodes}, and `mingpt launch` is for one task a node: give srun "
            f"--ntasks={nodes} --ntasks-per-node=1"
            + ("; or start `mingpt train` in place of it, once for each GPU" if tasks > nodes else "")
        )
    return Placement(
        "Slurm", addresses, rank, gpus, f"slurm-{environment.get('SLURM_JOB_ID')}", slurm_job.port(environment)
    )


def sing(environment: Environment) -> Placement | None:
    """This node's place by SING_*, of a platform that starts one container per node; None outside of it.

    Node R of job J has the host name J-R.SUFFIX. Raises UserError if the variables contradict each other or the DNS.
    """
    if not any(map(environment.get, SING)):
        return None
    where = "the variables SING_*"
    cure = "correct them, or unset all of them"
    _require(where, SING, environment)
    job, suffix, master = (environment[name] for name in SING[2:])
    try:
        rank = int(environment["SING_RANK"])
        nodes = int(environment["SING_WORLD_SIZE"])
    except ValueError as error:
        raise UserError(f"{where}: SING_RANK, SING_WORLD_SIZE: {error}: {cure}") from error
    if not 0 <= rank < nodes:
        raise UserError(f"{where} contradict each other: SING_RANK={rank}, SING_WORLD_SIZE={nodes}: {cure}")
    addresses = tuple(f"{job}-{r}.{suffix}" for r in range(nodes))
    own = environment.get("SING_HOST_ADDR", addresses[rank])
    if own != addresses[rank]:
        raise UserError(
            f"{where} contradict each other: SING_HOST_ADDR={own}, but node {rank} is {addresses[rank]}: {cure}"
        )
    from mingpt.world.network import is_of_this_machine  # imports psutil; all else needs no package

    # Variables alone prove nothing: a container that is started anew may keep those of another, and two nodes with one
    # rank would wait for ever, or write one run twice.
    ips = resolved(own)
    if not any(map(is_of_this_machine, ips)):
        raise UserError(
            f"SING_RANK={rank}: {own} is {', '.join(ips)}, which is no address of this machine: another container has "
            f"this rank, or its name is out of date"
        )
    if master != addresses[0] and not set(resolved(master)) & set(resolved(addresses[0])):
        raise UserError(
            f"{where} contradict each other: SING_MASTER_ADDR={master} is another machine than node 0, {addresses[0]}: "
            f"{cure}"
        )
    return Placement("the platform that sets SING_*", addresses, rank, None, job)


def resolved(name: str, label: str = "") -> list[str]:
    """The addresses of a host, sorted. Raises UserError if the DNS does not know it within NAMES_SECONDS.

    label: where the name comes from, for the message.
    """
    deadline = time.monotonic() + NAMES_SECONDS
    while True:
        try:
            # Bytes: of a text that can't be a host's name, Python raises a UnicodeError in place of an OSError.
            answers = socket.getaddrinfo(name.encode(), PORT, type=socket.SOCK_STREAM)
            return sorted({str(address[0]) for *_, address in answers})
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{label}{name}: {error.strerror}, for {NAMES_SECONDS} s: no name server of this machine knows it: "
                    f"look at the variables that make up this name, and at the platform's DNS"
                ) from error
            time.sleep(1)


# torchrun's options that may come from PET_… variables. Kubeflow's TrainJob and its elastic PyTorchJob set them.
OPTIONS = (
    *("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_addr"),
)
PER_NODE_OPTIONS = ("nproc_per_node", "rdzv_conf", "local_addr")  # a node may have its own: the command line decides
PYTORCHJOB_VARIABLES = {
    "nnodes": "WORLD_SIZE",
    "node_rank": "RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}


def options_of(environment: Environment, command_line: Mapping[str, str | None]) -> Options:
    """torchrun's options from PET_… variables, and what those do not say from the four variables of a PyTorchJob.

    Returns the variable and the value of each. command_line: its options. Raises UserError if the
    variables announce other nodes but are incomplete, contradict each other, or say something else than the command
    line.
    """
    # Each of these mistakes was a pod that trained alone, beside its siblings, or waited for nobody.
    options = Options()
    for name in OPTIONS:
        variable = f"PET_{name.upper()}"
        value = environment.get(variable, "").strip()
        if value:
            options[name] = (variable, value)
    of_others = [options[name][0] for name in ("node_rank", "master_addr", "rdzv_endpoint") if name in options]
    # One pod of a PyTorchJob has RANK=0 and WORLD_SIZE=1: these say nothing then.
    if _above_one(environment, "WORLD_SIZE") or environment.get("RANK", "0").strip() not in ("", "0"):
        options |= _of_job(environment, options, command_line)
    if of_others and "nnodes" not in options and not command_line.get("nnodes"):
        _require("torchrun's variables", ["PET_NNODES"], environment, of_others)
    problems = list[str]()
    for name, (variable, value) in options.items():
        if name not in PER_NODE_OPTIONS and command_line.get(name) not in (None, value):
            problems.append(
                f"--{name.replace('_', '-')}={command_line[name]} contradicts {variable}={value} in the environment: "
                f"leave the option out, or unset the variable"
            )
    if problems:
        raise UserError(*problems)
    return options


def _of_job(
    environment: Environment, options: Mapping[str, tuple[str, str]], command_line: Mapping[str, str | None]
) -> Options:
    """What a PyTorchJob's variables add to torchrun's (`options`). Raises UserError as `options_of`."""
    sizes = _sizes_of_job(options, command_line)
    problems = list[str]()
    missing = dict[str, str]()  # the variable by the option that torchrun's variables do not say
    for option, name in PYTORCHJOB_VARIABLES.items():
        value = environment.get(name, "").strip()
        if option not in options:
            missing[option] = name
            continue
        variable, ours = options[option]
        if value in ("", ours) or (option == "nnodes" and (value in sizes or ":" in ours)):
            continue
        problems.append(
            f"{variable}={ours} and {name}={value} in the environment contradict each other: correct one, or unset it"
        )
    if problems:
        raise UserError(*problems)
    if "rdzv_endpoint" in options:  # an elastic job: its node 0 may be another pod than that of RANK 0
        return {}
    if not options.keys() >= {"nnodes", "node_rank", "master_addr"}:
        others = [name for name in PYTORCHJOB_VARIABLES.values() if environment.get(name)]
        _require("a PyTorchJob's variables", list(missing.values()), environment, others)
    added = Options()
    for option, name in missing.items():
        value = environment.get(name, "").strip()
        if value:
            added[option] = (name, value)
    return added


def _sizes_of_job(options: Mapping[str, tuple[str, str]], command_line: Mapping[str, str | None]) -> set[str]:
    """What WORLD_SIZE may be where PET_NNODES is set."""
    # Since v1.7 of the training operator, WORLD_SIZE counts processes; PET_NNODES is always there, and has the word.
    nodes = options.get("nnodes", ("", ""))[1]
    sizes = {nodes}
    for per_node in (options.get("nproc_per_node", ("", ""))[1], command_line.get("nproc_per_node") or ""):
        if nodes.isdecimal() and per_node.isdecimal():
            sizes.add(str(int(nodes) * int(per_node)))
    return sizes


def require_launcher(environment: Environment) -> None:
    """Raise UserError if PET_NNODES or WORLD_SIZE announces others, but no launcher has given this process a rank."""
    if "RANK" in environment:
        return
    alone = "and this process would run alone: start it with `mingpt launch` or torchrun, or unset"
    nodes = environment.get("PET_NNODES", "")
    if re.search(r"(^|:)0*([2-9]|1\d)", nodes):
        raise UserError(f"PET_NNODES={nodes} in the environment announces several nodes, {alone} PET_NNODES")
    size = environment.get("WORLD_SIZE", "")
    if re.fullmatch(r"0*([2-9]|1\d)\d*", size):
        raise UserError(
            f"WORLD_SIZE={size} in the environment announces several processes, but RANK is not set, {alone} WORLD_SIZE"
        )


# In this order: SkyPilot on Slurm has the variables of both, and SkyPilot's name the nodes that it started.
PLATFORMS = (skypilot, slurm, sing)


def find_placement(environment: Environment) -> Placement | None:
    """This node's place by the first platform whose variables are set; None without a platform."""
    for platform in PLATFORMS:
        placement = platform(environment)
        if placement:
            return placement
    return None


def cores() -> int:
    """How many CPUs this process may use: a container or Slurm may give it a part of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
