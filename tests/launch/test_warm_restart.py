"""Restarts with a warm standby and without one: the same bits, and nothing of it outlives its launcher."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from mingpt.compute.compiler import FOLDER
from mingpt.world.standby import COMPILES
from tests.kits.fault_kit import LONG, STEPS, finish, launch
from tests.kits.node_kit import Node
from tests.kits.paths_kit import ran
from tests.kits.run_kit import NewRun

pytestmark = pytest.mark.slow


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def standbys(node: Node) -> list[int]:
    return [pid for pid in node.processes() if comm(pid) == "standby"]


@pytest.mark.parametrize("warm", [True, False])
def test_a_restart_has_the_bits_of_a_run_that_nobody_disturbed(
    warm: bool, new_run: NewRun, undisturbed: NewRun
) -> None:
    run, names, there = new_run(), list[list[str]](), list[list[int]]()

    def on_step(step: int) -> None:
        if step in (30, STEPS - 10) and len(names) == (step > 30):
            names.append([*map(comm, node.workers())])
            there.append(standbys(node))
            if step == 30:
                os.kill(node.workers()[1], signal.SIGKILL)

    node = Node(launch(run, "train.log_every=1"), {} if warm else {"MINGPT_STANDBY": "0"}, on_step=on_step)
    output = finish(node, 0)
    assert [set(found) == {"rank 0", "rank 1"} for found in names] == [warm] * 2
    assert [len(found) for found in there] == [warm] * 2
    assert there[0] == there[1]
    assert len(re.findall(r"^resumed from step (?:20|40) ", output, re.M)) == 1
    assert run.digest() == undisturbed(*LONG).digest()


IMPORTS = """
import os, sys, torch

def touched(name):
    return lambda *a, **k: print("touched", name) or 0

for name in ("init", "_lazy_init", "is_available", "device_count", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, touched(name))
for name in ("is_available", "device_count", "current_accelerator"):
    setattr(torch.accelerator, name, touched(name))
from mingpt.train.__main__ import imports
imports()
print(len(os.listdir("/proc/self/task")), "thread")
assert ("torch._inductor.compile_fx" in sys.modules) == ("MINGPT_STANDBY_COMPILES" in os.environ)
"""


@pytest.mark.parametrize("more", [{}, {COMPILES: "1", FOLDER: "/nowhere"}], ids=["eager", "compiled"])
def test_the_imports_touch_no_device_and_start_no_thread(more: dict[str, str], tmp_path: Path) -> None:
    """CUDA that was initialized before a fork can't be used after it."""
    more = {name: value.replace("/nowhere", str(tmp_path)) for name, value in more.items()}
    done = ran([sys.executable, "-c", IMPORTS], env={**os.environ, "OMP_NUM_THREADS": "1", **more})
    assert done.stdout == "1 thread\n"


WITHOUT_TORCH = """
import os, sys
from mingpt.world import standby

def made(self, *settings):
    print("torch" in sys.modules)
    os._exit(0)

standby.Standby.__init__ = made
from mingpt.__main__ import main
sys.argv = ["mingpt", "launch", "--nproc-per-node=2", "data=random"]
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a standby is Linux's alone")
def test_the_standby_begins_before_the_launcher_imports_torch(tmp_path: Path) -> None:
    """So both import it at the same time."""
    assert ran([sys.executable, "-c", WITHOUT_TORCH], cwd=tmp_path).stdout.splitlines()[-1] == "False"
