"""recipes/slurm/cluster: the files that a list of machines gives. (The lab's Slurm runs on them.)"""

import subprocess
from pathlib import Path

import pytest

from paths_kit import ROOT

CLUSTER = ROOT / "recipes/slurm/cluster"


def configure(folder: Path, nodes: str) -> "subprocess.CompletedProcess[str]":
    command = ["bash", str(CLUSTER / "config.sh"), str(folder), "head", "10.0.0.1"]
    return subprocess.run(command, input=nodes, capture_output=True, text=True, timeout=600)


def test_the_list_of_machines_becomes_three_files_again_and_again_the_same(tmp_path: Path) -> None:
    nodes = (CLUSTER / "nodes.example").read_text()
    assert configure(tmp_path / "first", nodes).returncode == 0
    assert configure(tmp_path / "again", nodes).returncode == 0
    written = {file.name: file.read_text() for file in (tmp_path / "first").iterdir()}
    assert written == {file.name: file.read_text() for file in (tmp_path / "again").iterdir()}
    assert sorted(written) == ["cgroup.conf", "gres.conf", "slurm.conf"]
    assert written["gres.conf"].splitlines() == [
        "NodeName=gpu1 Name=gpu Type=L4 File=/dev/nvidia[0-3]",
        "NodeName=gpu2 Name=gpu Type=L4 File=/dev/nvidia[0-3]",
    ]
    lines = written["slurm.conf"].splitlines()
    assert "SlurmctldHost=head(10.0.0.1)" in lines
    assert [line for line in lines if line.startswith(("NodeName", "PartitionName"))] == [
        "NodeName=gpu1 NodeAddr=10.0.0.11 CPUs=48 RealMemory=190000 Gres=gpu:L4:4 State=UNKNOWN",
        "NodeName=gpu2 NodeAddr=10.0.0.12 CPUs=48 RealMemory=190000 Gres=gpu:L4:4 State=UNKNOWN",
        "NodeName=cpu1 NodeAddr=10.0.0.21 CPUs=16 RealMemory=60000 State=UNKNOWN",
        "PartitionName=main Nodes=gpu1,gpu2,cpu1 Default=YES DefaultTime=1-00:00:00 MaxTime=UNLIMITED State=UP",
    ]


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("gpu1 10.0.0.1 8 1000 4", "'gpu1 10.0.0.1 8 1000 4': a line is NAME ADDRESS CPUS MEMORY_MB TYPE:NUMBER"),
        ("gpu1 10.0.0.1 8", "'gpu1 10.0.0.1 8  ': a line is NAME ADDRESS CPUS MEMORY_MB TYPE:NUMBER"),
        ("# nobody\n\n", "no machines: give one a line"),
    ],
)
def test_a_wrong_list_is_told_and_nothing_is_written(nodes: str, said: str, tmp_path: Path) -> None:
    done = configure(tmp_path / "conf", nodes)
    assert done.returncode == 64
    assert said in done.stderr
    assert not (tmp_path / "conf").exists()
