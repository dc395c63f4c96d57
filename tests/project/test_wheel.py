"""The wheel, as hatchling builds it, in an empty folder: it needs nothing of the checkout."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from paths_kit import ROOT

SHORT = ("experiment=synthetic", "train.max_steps=3", "train.eval_every=0", "world.device=cpu")


@pytest.mark.slow
@pytest.mark.nightly
def test_a_wheel_trains_in_an_empty_folder(tmp_path: Path) -> None:
    """Its own folder on the path is all that an installation adds; packages it needs are those of the tests."""
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path / "dist"), versions=["standard"])
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert {path.name for path in site.iterdir() if "dist-info" not in path.name} == {"mingpt", "hydra_plugins"}
    (about,) = site.glob("*.dist-info")
    (entry,) = re.findall(r"^mingpt = ([\w.]+):main$", (about / "entry_points.txt").read_text(), re.M)
    no_checkout = f"import sys; sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]"
    script = f"{no_checkout}; import mingpt; print(mingpt.__file__); from {entry} import main; sys.exit(main())"

    def train(*overrides: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-c", script, "train", *overrides],
            cwd=empty,
            env={**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )

    done = train(*SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    where, *lines = done.stdout.splitlines()
    assert where == str(site / "mingpt/__init__.py")
    assert any(line.startswith("finished: step 3, digest ") for line in lines)
    assert [path.name for path in empty.iterdir()] == ["runs"]
    images = train("experiment=mnist")
    assert images.returncode == 64
    assert images.stderr.count("the examples are in the project's checkout, not in the installed package") == 2
