"""The wheel, as hatchling builds it, in an empty folder: it needs nothing of the checkout."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import mingpt
from tests.kits.paths_kit import ROOT, ran


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("dist")), versions=["standard"])
    return Path(path)


def test_a_wheel_has_a_name_of_its_own_and_what_users_need(wheel: Path) -> None:
    assert wheel.name == f"mingpt_exact-{mingpt.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"mingpt/py.typed", "mingpt/configs/train.yaml", "mingpt/configs/schema.json"} <= names
    [version, date] = re.findall(r"^(?:version|date-released): (.*)", (ROOT / "CITATION.cff").read_text(), re.M)
    assert version == mingpt.__version__
    assert re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.M)[0] == f"[{version}] - {date}"


@pytest.mark.slow
def test_a_wheel_trains_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """Its own folder on the path is all that an installation adds; packages it needs are those of the tests."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert {path.name for path in site.iterdir() if "dist-info" not in path.name} == {"mingpt", "hydra_plugins"}
    (about,) = site.glob("*.dist-info")
    (entry,) = re.findall(r"^mingpt = ([\w.]+):main$", (about / "entry_points.txt").read_text(), re.M)
    no_checkout = f"import sys; sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]"
    script = f"{no_checkout}; import mingpt; print(mingpt.__file__); from {entry} import main; sys.exit(main())"

    def train(words: str, code: int) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", script, "train", *words.split()]
        env = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
        done = ran(command, cwd=empty, env=env)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    said = train("data=random data.vocabulary=50 model=gpt-nano train.max_steps=3 world.device=cpu", 0).stdout
    assert said.startswith(f"{site}/mingpt/__init__.py\n")
    assert "\nfinished: step 3, digest " in said
    assert [path.name for path in empty.iterdir()] == ["runs"]
    lost = "the examples are in the project's checkout, not in the installed package"
    assert train("experiment=mnist", 64).stderr.count(lost) == 2


@pytest.mark.slow
@pytest.mark.nightly
def test_a_wheel_in_an_empty_environment_trains_reports_and_exports(wheel: Path, tmp_path: Path) -> None:
    """With the packages that it names, and none of the tests', in the lock's versions; torch for CPUs if possible."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MINGPT_", "VIRTUAL_ENV"))}
    programs, empty = tmp_path / "venv/bin", tmp_path / "empty"
    empty.mkdir()
    lock, torch = ROOT / "constraints.txt", ROOT / "constraints-cpu.txt"

    def does(*command: object, codes: tuple[int, ...] = (0,)) -> str:
        done = ran(command, cwd=empty, env=environment)
        assert done.returncode in codes, done.stdout + done.stderr
        return done.stdout

    def installs(*what: object, codes: tuple[int, ...] = (0,)) -> None:
        does(programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what, codes=codes)

    does(sys.executable, "-m", "venv", programs.parent)
    [pip] = re.findall(r"^pip==.*\n(?:    .*\n)+", lock.read_text(), re.M)  # an older one takes no lock with hashes
    (tmp_path / "pip.txt").write_text(pip)
    installs("--no-deps", "--require-hashes", "-r", tmp_path / "pip.txt")
    installs("--no-deps", "--require-hashes", "-r", torch, codes=(0, 1))
    installs("--no-deps", wheel)
    installs("-c", lock, "mingpt-exact")
    assert does(programs / "python", "-m", "pip", "check") == "No broken requirements found.\n"
    (empty / "book.txt").write_text("the cat sat on the mat, and the dog sat on the cat. " * 200)
    train = "train data=char data.path=book.txt model=gpt-nano train.max_steps=3 world.device=cpu run.dir=runs/book"
    assert "\nfinished: step 3, digest " in does(programs / "mingpt", *train.split())
    assert "report: runs/book/report.html" in does(programs / "mingpt", "report", "runs/book")
    does(programs / "mingpt", "export", "runs/book", "exported")
    assert {"config.json", "model.safetensors"} <= {path.name for path in (empty / "exported").iterdir()}
