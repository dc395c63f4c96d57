"""What a launcher (torchrun, srun, `mingpt launch`) has told this process: read and checked here, wherever it is asked.

And how a process of this package starts Python again, so that no file of the current folder stands for a package. (Code
of the user's own lies there: config/imports.py finds it, after all packages.)

Imports only the standard library: it is asked before torch is imported, which takes seconds.
"""

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from mingpt.errors import UserError

START = str(Path(__file__).with_name("start"))  # `python START MODULE` in place of `python -m MODULE`
AGENT_PID = "MINGPT_AGENT_PID"  # set by mingpt.launch for its workers
OVERRIDES = "MINGPT_OVERRIDES"  # the config's overrides as a JSON list; set by mingpt.launch for its workers
LARGEST = 2**31 - 1  # as config.section.LARGEST, whose module imports pydantic


@dataclass(frozen=True)
class Env:
    """Without RANK this process is rank 0. Unless it is checked, a number that is missing or wrong is 0."""

    launched: bool  # it has a RANK
    rank: int
    size: int
    host: str  # of the rendezvous' store
    port: int  # of that store
    hosts: bool  # this process, not its agent, has that store
    local_rank: int
    local_size: int  # processes of this node; 0: nobody has said
    agent: int | None  # the pid of torchrun's agent, which has started this process; None: there is none
    ours: bool  # that agent is mingpt.launch
    job: str  # what SkyPilot or Slurm calls the job, through all of its restarts
    node: str  # equal for the processes of a node
    head: bool  # SkyPilot or Slurm calls that node its first

    @classmethod
    def read(cls, check: bool = False) -> "Env":
        """check: raise UserError with all that is wrong, or missing beside RANK."""
        # Read anew each time, which takes 15 µs: kept in a global it would be stale once srun's variables are set
        # (slurm.py), or a process has got another rank (joining.py).
        variables = os.environ
        problems = list[str]()
        start = "start with torchrun"
        launched = "RANK" in variables
        needed = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if launched else ()
        missing = [name for name in needed if not variables.get(name, "").strip()]
        if missing:
            problems.append(f"RANK is set in the environment, but not {', '.join(missing)}: {start}, or set all")

        def number(name: str, least: int, most: int, default: str = "0") -> int:
            text = variables.get(name, default)
            if text.isdecimal() and least <= int(text) <= most:
                return int(text)
            if name not in missing:
                problems.append(f"{name}={text} in the environment: set a number from {least} to {most}, or {start}")
            return 0

        size = number("WORLD_SIZE", 1, LARGEST, "" if launched else "1")
        rank = number("RANK", 0, (size or LARGEST) - 1)
        env = cls(
            launched=launched,
            rank=rank,
            size=size,
            host=variables.get("MASTER_ADDR", ""),
            port=number("MASTER_PORT", 1, 65535) if launched else 0,
            hosts=rank == 0 and variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            local_rank=number("LOCAL_RANK", 0, LARGEST),
            # At least 1 if it is there.
            local_size=number("LOCAL_WORLD_SIZE", int("LOCAL_WORLD_SIZE" in variables), LARGEST),
            agent=int(variables.get(AGENT_PID, os.getppid())) if "TORCHELASTIC_RUN_ID" in variables else None,
            ours=AGENT_PID in variables,
            job=variables.get("SKYPILOT_TASK_ID") or variables.get("SLURM_JOB_ID") or "",
            # torchrun's number, and that of srun's tasks without torchrun, whose ranks may alternate between nodes. A
            # host name comes last: two nodes may have one (localhost), and two launchers on one machine are two nodes.
            node=variables.get("GROUP_RANK") or variables.get("SLURM_NODEID") or socket.gethostname(),
            head=(variables.get("SKYPILOT_NODE_RANK") or variables.get("SLURM_NODEID")) == "0",
        )
        if check and problems:
            raise UserError(*problems)
        return env


def keep_from_current_folder() -> None:
    """Have multiprocessing's children, which are `python -c`, not search the current folder before all else."""
    from multiprocessing import util  # not at the top: `mingpt --help` imports this file

    # They import their packages by this process's sys.path, which they are sent. -P is not in Python 3.10, and -I also
    # ignores the variables PYTHON…, of which they need none then.
    flags = util._args_from_interpreter_flags  # type: ignore[attr-defined] # what sets them is not public
    here = "-P" if sys.version_info >= (3, 11) else "-I"
    util._args_from_interpreter_flags = lambda: [*flags(), here]  # type: ignore[attr-defined]
