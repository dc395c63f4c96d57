"""What a launcher (torchrun, srun, `mingpt launch`) has told this process: read and checked here, wherever it is asked.

Imports only the standard library: it is asked before torch is imported, which takes seconds.
"""

import os
import socket
from dataclasses import dataclass

from mingpt.errors import UserError

AGENT_PID = "MINGPT_AGENT_PID"  # set by mingpt.launch for its workers
OVERRIDES = "MINGPT_OVERRIDES"  # the config's overrides as a JSON list; set by mingpt.launch for its workers
MOST = 2**31 - 1  # as config.section.LARGEST, whose module imports pydantic


@dataclass(frozen=True)
class Env:
    """Without RANK this process is rank 0. Unless it is checked, a number that is missing or wrong is 0.

    launched: whether it has a RANK. hosts: whether this process, not its agent, has the store at host:port. local_size:
    processes of this node; 0: nobody has said. agent: the pid of torchrun's agent, which has started this process;
    None: there is none. ours: that agent is mingpt.launch. job: what SkyPilot or Slurm calls the job, through all of
    its restarts. node: equal for the processes of a node. head: whether SkyPilot or Slurm calls that node its first.
    """

    launched: bool
    rank: int
    size: int
    host: str
    port: int
    hosts: bool
    local_rank: int
    local_size: int
    agent: int | None
    ours: bool
    job: str
    node: str
    head: bool

    @classmethod
    def read(cls, check: bool = False) -> "Env":
        """check: raise UserError with all that is wrong, or missing beside RANK."""
        given, problems, start = os.environ, list[str](), "start with torchrun"
        launched = "RANK" in given
        needed = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if launched else ()
        if missing := [name for name in needed if not given.get(name, "").strip()]:
            problems.append(f"RANK is set in the environment, but not {', '.join(missing)}: {start}, or set all")

        def number(name: str, least: int, most: int, default: str = "0") -> int:
            text = given.get(name, default)
            if text.isdecimal() and least <= int(text) <= most:
                return int(text)
            if name not in missing:
                problems.append(f"{name}={text} in the environment: set a number from {least} to {most}, or {start}")
            return 0

        size = number("WORLD_SIZE", 1, MOST, "" if launched else "1")
        rank = number("RANK", 0, (size or MOST) - 1)
        env = cls(
            launched=launched,
            rank=rank,
            size=size,
            host=given.get("MASTER_ADDR", ""),
            port=number("MASTER_PORT", 1, 65535) if launched else 0,
            hosts=rank == 0 and given.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            local_rank=number("LOCAL_RANK", 0, MOST),
            local_size=number("LOCAL_WORLD_SIZE", int("LOCAL_WORLD_SIZE" in given), MOST),  # given, it is not 0
            agent=int(given.get(AGENT_PID, os.getppid())) if "TORCHELASTIC_RUN_ID" in given else None,
            ours=AGENT_PID in given,
            job=given.get("SKYPILOT_TASK_ID") or given.get("SLURM_JOB_ID") or "",
            # torchrun's number, and that of srun's tasks without torchrun, whose ranks may alternate between nodes.
            node=given.get("GROUP_RANK") or given.get("SLURM_NODEID") or socket.gethostname(),
            head=(given.get("SKYPILOT_NODE_RANK") or given.get("SLURM_NODEID")) == "0",
        )
        if check and problems:
            raise UserError(*problems)
        return env
