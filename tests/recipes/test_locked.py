"""recipes/locked.py with tiny wheels in a folder: it installs what a lock says and nothing else; and the real locks."""

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from paths_kit import ROOT

LOCKED = "recipes/locked.py"


def zipped(folder: Path, name: str, version: str, files: dict[str, bytes]) -> str:
    """A wheel; the line for it in a lock."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files |= {f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n", f"{info}/RECORD": b""}
    with zipfile.ZipFile(path, "w") as wheel:
        for file, content in files.items():
            wheel.writestr(file, content)
    return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def wheel(folder: Path, name: str, version: str, needs: str = "") -> str:
    info = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: more\n{needs}".encode()
    module = {f"{name}.py": b"", f"{name}-{version}.dist-info/METADATA": info}
    return zipped(folder, name, version, module)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """All that pip can reach."""
    (folder := tmp_path / "index").mkdir()
    return folder


@pytest.fixture
def lock(index: Path) -> Path:
    """It has what reads requirements, packed from where the tests run, and a package with two that it needs."""
    packaging = metadata.distribution("packaging")
    files = {
        str(file): Path(str(packaging.locate_file(file))).read_bytes()
        for file in packaging.files or ()
        if file.suffix == ".py" or file.name == "METADATA"
    }
    needs = (
        "Requires-Dist: mg-sure>=2\nRequires-Dist: mg_extra; extra == 'more'\nRequires-Dist: mg-os; os_name == 'dos'\n"
    )
    entries = [
        "# how to make it\n",
        zipped(index, "packaging", packaging.version, files),
        wheel(index, "mg_top", "1.0", needs),
        wheel(index, "mg_sure", "2.0"),
        wheel(index, "mg_extra", "1.0"),
        wheel(index, "mg_unwanted", "1.0"),
    ]
    (path := index.parent / "lock.txt").write_text("".join(entries))
    return path


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=600)
    return folder


@pytest.fixture
def python(bare: Path) -> str:
    """That of an environment which has pip and nothing of the lock's."""
    program = str(bare / "bin/python")
    names = ["packaging", "mg_top", "mg_sure", "mg_extra"]
    subprocess.run([program, "-m", "pip", "uninstall", "-qqy", *names], check=True, timeout=600)
    return program


def install(python: str, lock: Path, *roots: str) -> tuple[int, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(lock.parent / "index"), "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [python, LOCKED, str(lock), *roots], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
    )
    return done.returncode, done.stderr


def installed(python: str) -> dict[str, str]:
    code = (
        "from importlib import metadata as m; [print(d.name, d.version) for d in m.distributions() if 'mg' in d.name]"
    )
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=600).stdout
    return dict(line.split() for line in said.splitlines())


@pytest.mark.slow
@pytest.mark.nightly
def test_what_a_package_needs_on_this_machine_comes_with_it_and_the_rest_of_the_lock_does_not(
    python: str, lock: Path
) -> None:
    assert install(python, lock, "mg_top") == (0, "")
    assert installed(python) == {"mg_top": "1.0", "mg_sure": "2.0"}
    assert install(python, lock, "mg-top[more]") == (0, "")  # as setup.sh adds extras
    assert installed(python) == {"mg_top": "1.0", "mg_sure": "2.0", "mg_extra": "1.0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    ["exchanged", *(pytest.param(w, marks=pytest.mark.nightly) for w in ("lacking", "older", "without hashes"))],
)
def test_what_is_not_as_the_lock_has_it_is_refused(python: str, lock: Path, index: Path, wrong: str) -> None:
    sure, top, said = r"mg_sure.*\n.*\n", "mg_top", "mg-sure"
    if wrong == "exchanged":
        wheel(index, "mg_sure", "2.0", "Summary: not what the lock has seen\n")
        said = "DO NOT MATCH THE HASHES"
    elif wrong == "without hashes":
        lock.write_text("packaging==26.0\n")
        top, said = "packaging", "'packaging==26.0'"
    else:
        older = wheel(index, "mg_sure", "1.0") if wrong != "lacking" else ""
        lock.write_text(re.sub(sure, "", lock.read_text()) + older)
    code, err = install(python, lock, top)
    assert code == 1
    assert said in err
    assert installed(python).get("mg_sure") == ("1.0" if wrong == "older" else None)


def test_the_systems_python_is_left_alone(lock: Path) -> None:
    system = getattr(sys, "_base_executable", sys.executable)
    code, said = install(system, lock, "mg_top")
    assert code == 64
    assert system in said


# --- the locks as they are ---


def entries(name: str) -> list[str]:
    return re.split(r"\n(?=[a-z0-9])", re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.M).strip())


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-sky.txt", "constraints-cpu.txt"])
def test_each_entry_has_a_version_and_hashes_and_no_place(name: str) -> None:
    entry = r"[\w.-]+==[\w.+]+( ; [^\\]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+"
    assert [e for e in entries(name) if not re.fullmatch(entry, e.rstrip()) or "://" in e] == []


def test_the_lock_has_what_builds_the_package_and_torch_for_cpus_is_of_its_version() -> None:
    versions = {entry.split("==")[0]: entry.split()[0] for entry in entries("constraints.txt")}
    assert {"hatchling", "setuptools", "packaging", "pip"} <= versions.keys()
    assert [entry.split()[0] for entry in entries("constraints-cpu.txt")] == [f"{versions['torch']}+cpu"]
    text = (ROOT / "pyproject.toml").read_text()
    (build,) = re.findall(r'^requires = \["([^"]+)"\]', text, re.M)
    assert f'build = ["{build}",' in text  # what uv locks is what builds


def test_no_fsspec_is_allowed_that_runs_code_out_of_a_url() -> None:
    floors = dict(re.findall(r'"(fsspec|s3fs|gcsfs)>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text()))
    assert floors.keys() == {"fsspec", "s3fs", "gcsfs"}
    assert all(tuple(map(int, floor.split("."))) >= (2026, 6) for floor in floors.values()), floors


@pytest.mark.parametrize("file", ["Makefile", "recipes/setup.sh", "recipes/container/Dockerfile"])
def test_nothing_is_installed_beside_the_locks(file: str) -> None:
    commands = re.sub(r"^\s*#.*\n", "", (ROOT / file).read_text(), flags=re.M)
    assert "locked.py" in commands
    assert not re.search(r"pip3? install(?!.* --require-hashes)|uv venv.* --seed|npm install", commands)
    assert "npm ci" not in commands or "--ignore-scripts" in commands


def test_npms_lock_has_hashes_and_no_place() -> None:
    text = (ROOT / "tests/azurite/package-lock.json").read_text()
    assert '"resolved"' not in text
    assert text.count('"integrity"') == text.count('"node_modules/') > 100
