"""recipes/slurm/cluster: the files that a list of machines gives. (The lab's Slurm runs on them.)"""

import re
import subprocess
from pathlib import Path

import pytest

from tests.kits.paths_kit import ROOT, ran
from tests.kits.told import Told

CLUSTER = ROOT / "recipes/slurm/cluster"


def configure(folder: Path, nodes: str) -> "subprocess.CompletedProcess[str]":
    command = ["bash", str(CLUSTER / "config.sh"), str(folder), "head", "10.0.0.1"]
    return ran(command, input=nodes)


def test_the_list_of_machines_becomes_three_files_again_and_again_the_same(tmp_path: Path) -> None:
    nodes = (CLUSTER / "nodes.example").read_text()
    for folder in ("first", "again"):
        assert configure(tmp_path / folder, nodes).returncode == 0
    written = {file.name: file.read_text() for file in (tmp_path / "first").iterdir()}
    assert written == {file.name: file.read_text() for file in (tmp_path / "again").iterdir()}
    assert sorted(written) == ["cgroup.conf", "gres.conf", "slurm.conf"]
    own = re.findall(r"^(?:NodeName|PartitionName|SlurmctldHost).*", written["slurm.conf"], re.M)
    assert written["gres.conf"].splitlines() == [
        f"NodeName={name} Name=gpu Type=L4 File=/dev/nvidia[0-3]" for name in ("gpu1", "gpu2")
    ]
    gpus = "CPUs=48 RealMemory=190000 Gres=gpu:L4:4 State=UNKNOWN"
    assert own == [
        "SlurmctldHost=head(10.0.0.1)",
        f"NodeName=gpu1 NodeAddr=10.0.0.11 {gpus}",
        f"NodeName=gpu2 NodeAddr=10.0.0.12 {gpus}",
        "NodeName=cpu1 NodeAddr=10.0.0.21 CPUs=16 RealMemory=60000 State=UNKNOWN",
        "PartitionName=main Nodes=gpu1,gpu2,cpu1 Default=YES DefaultTime=1-00:00:00 MaxTime=UNLIMITED State=UP",
    ]


@pytest.mark.parametrize("nodes", ["gpu1 10.0.0.1 8 1000 4", "gpu1 10.0.0.1 8", "# nobody\n\n"])
def test_a_wrong_list_is_told_and_nothing_is_written(nodes: str, tmp_path: Path, told: Told) -> None:
    done = configure(tmp_path / "conf", nodes)
    assert done.returncode == 64
    told(done.stderr, tmp_path)
    assert not (tmp_path / "conf").exists()
