"""recipes/container/Dockerfile: the image that a container engine builds, and a container of it."""

import ast
import shutil

import pytest

from paths_kit import ROOT, ran

ENGINE = shutil.which("docker") or shutil.which("podman")

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not ENGINE, reason="needs docker or podman"),
]


def test_the_image_holds_the_data_and_little_else_and_trains_without_an_argument() -> None:
    """Two containers of it: recipes/test_container.py."""
    ran([ENGINE, "build", "-f", "recipes/container/Dockerfile", "-t", "mingpt-test", "."], cwd=ROOT, check=True)
    run = [ENGINE, "run", "--rm", "--env=OVERRIDES=train.max_steps=40", "mingpt-test"]
    look = "import mingpt, os; print([os.getuid(), mingpt.__file__[:13], sorted(os.listdir())])"
    found = ast.literal_eval(ran([*run, "python", "-c", look], check=True).stdout)
    assert found == [1000, "/opt/venv/lib", ["data", "dist.py", "examples"]]
    assert "finished: step 40, digest " in ran(run, check=True).stdout
