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


def test_the_list_of_machines_becomes_three_files_again_and_again_the_same(tmp_path: Path, told: Told) -> None:
    nodes = (CLUSTER / "nodes.example").read_text()
    for folder in ("first", "again"):
        assert configure(tmp_path / folder, nodes).returncode == 0
    written = {file.name: file.read_text() for file in (tmp_path / "first").iterdir()}
    assert written == {file.name: file.read_text() for file in (tmp_path / "again").iterdir()}
    assert sorted(written) == ["cgroup.conf", "gres.conf", "slurm.conf"]
    own = re.findall(r"^(?:NodeName|PartitionName|SlurmctldHost).*", written["slurm.conf"], re.M)
    told([written["gres.conf"], *own], tmp_path)


@pytest.mark.parametrize("nodes", ["gpu1 10.0.0.1 8 1000 4", "gpu1 10.0.0.1 8", "# nobody\n\n"])
def test_a_wrong_list_is_told_and_nothing_is_written(nodes: str, tmp_path: Path, told: Told) -> None:
    done = configure(tmp_path / "conf", nodes)
    assert done.returncode == 64
    told(done.stderr, tmp_path)
    assert not (tmp_path / "conf").exists()
