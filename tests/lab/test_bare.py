"""From bare machines to a job that trains: recipes/slurm/cluster/README.md, its commands as they are written there."""

import os
import re
import shutil
import sys
from collections.abc import Iterator

import pytest

from tests.kits.net_kit import needs_hosts
from tests.kits.node_kit import wait_until
from tests.lab.lab_kit import ROOT, SMALL, digest, undisturbed
from tests.lab.machine_kit import NETWORK, USER, USER_ID, Machines, machines

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    needs_hosts,
    pytest.mark.skipif(
        not (shutil.which("debootstrap") and shutil.which("apt-get")),
        reason="needs Debian or Ubuntu with debootstrap: apt-get install debootstrap",
    ),
]

README = (ROOT / "recipes/slurm/cluster/README.md").read_text()
NODES = ("gpu1", "gpu2")
LIST = "".join(f"{name} {NETWORK}.{11 + i} 2 4000 L4:1\n" for i, name in enumerate(NODES))
QUICK = (*SMALL, "world.timeout_seconds=30", "world.init_timeout_seconds=120")


def documented(start: str) -> str:
    """The command of README.md that starts with this."""
    found = re.search(rf"`((?:sudo )?{re.escape(start)}[^`]*)`", README)
    assert found, start
    return found[1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("alone"), "shakespeare_10m", SMALL)


@pytest.fixture(scope="module")
def bare(alone: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("bare")
    for closed in (folder, folder.parent, folder.parent.parent):
        closed.chmod(0o755)
    with machines(folder, {"ctl": 0, **dict.fromkeys(NODES, 1)}) as made:
        project = made.home / "mingpt"
        for name in ("mingpt", "configs", "recipes", "data"):
            shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
        (project / "recipes/slurm/cluster/nodes.txt").write_text(LIST)
        for path in (project, *project.rglob("*")):
            os.chown(path, USER_ID, USER_ID)
        yield made


@pytest.fixture(scope="module")
def cluster(bare: Machines) -> Machines:
    """Steps 3 and 4."""
    said = bare.run("ctl", documented("bash controller.sh"), folder=f"/home/{USER}/mingpt/recipes/slurm/cluster")
    assert "Slurmctld(primary) at ctl is UP" in said
    command = re.search(r"now, for each node: (.*)", said)
    assert command
    assert command[1] in README
    for node in NODES:
        assert f"node.sh: {node} is idle" in bare.run("ctl", command[1].replace("NODE", node))
    return bare


def submit(cluster: Machines, command: str) -> str:
    said = cluster.run("ctl", command, user=USER, folder="~/mingpt")
    found = re.fullmatch(r"Submitted batch job (\d+)\n", said)
    assert found, said
    return found[1]


def state(cluster: Machines, job: str) -> str:
    found = re.search(r"JobState=(\w+)", cluster.run("ctl", f"scontrol show job -o {job}"))
    assert found
    return found[1]


def log(cluster: Machines, file: str) -> str:
    path = cluster.home / "mingpt" / file
    return path.read_text() if path.exists() else ""


def finish(cluster: Machines, job: str, name: str) -> str:
    over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
    wait_until(lambda: state(cluster, job) in over, f"the end of job {job}", 600)
    said = log(cluster, f"{name}.out") + log(cluster, f"{name}.err")
    assert state(cluster, job) == "COMPLETED", said[-6000:]
    return said


def test_each_node_has_the_gpus_of_the_list(cluster: Machines) -> None:
    """Step 5."""
    job = submit(cluster, documented("sbatch --nodes=2 --gpus-per-node=1 recipes/slurm/cluster/test.sbatch"))
    said = finish(cluster, job, f"cluster-test-{job}")
    lines = [f"{node}: 1 CPUs, GPUs [0], rank {rank} of 2" for rank, node in enumerate(NODES)]
    assert sorted(said.splitlines()) == lines


def training(run: str, *more: str) -> str:
    command = documented("sbatch --nodes=2 --gpus-per-node=1 recipes/slurm/train.sbatch")
    return f"MINGPT_PYTHON={sys.prefix} {command} run.dir=$HOME/{run} {' '.join((*QUICK, *more))}"


def test_a_job_trains_as_one_process_does(cluster: Machines, alone: str) -> None:
    """Step 6."""
    job = submit(cluster, training("run"))
    said = finish(cluster, job, f"train_{job}")
    assert "2 processes on cpu (gloo)" in said
    assert "nodes are busy" not in said  # each step begins after the one before
    assert digest(cluster.home / "run") == alone
