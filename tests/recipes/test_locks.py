"""The locks, and pip with them: recipes/install.sh trusts `-c constraints.txt` to refuse what has not its hash."""

import hashlib
import os
import re
import sys
import zipfile
from pathlib import Path

import pytest

from paths_kit import ROOT, ran


def wheel(folder: Path, name: str, summary: str = "", needs: str = "") -> str:
    """A tiny wheel; the lines for it in a lock."""
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{summary}{needs}"
    kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {f"{name}.py": "", f"{info}/METADATA": about, f"{info}/WHEEL": kind}.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/RECORD", "")
    return f"{name}==1.0 \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.mark.parametrize(
    ("change", "said", "installed"),
    [("nothing", "", ["mg_sure.py", "mg_top.py"]), ("exchanged", "DO NOT MATCH THE HASHES", []), ("lacking", "mg", [])],
)
def test_pip_installs_what_the_lock_has_and_nothing_else(
    change: str, said: str, installed: list[str], tmp_path: Path
) -> None:
    (index := tmp_path / "index").mkdir()
    top = wheel(index, "mg_top", needs="Requires-Dist: mg-sure\n")
    sure = wheel(index, "mg_sure")
    if change == "exchanged":
        wheel(index, "mg_sure", "Summary: not what the lock has seen\n")
    lock = tmp_path / "lock.txt"
    lock.write_text(top + (sure if change != "lacking" else ""))
    env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--target",
        str(tmp_path / "to"),
        "-c",
        str(lock),
        "mg_top",
    ]
    done = ran(command, env=env)
    assert (done.returncode == 0) == (change == "nothing")
    assert said in done.stderr
    assert sorted(path.name for path in (tmp_path / "to").glob("*.py")) == installed


def entries(name: str) -> list[str]:
    return re.split(r"\n(?=[a-z0-9])", re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.M).strip())


@pytest.mark.parametrize("name", [f"constraints{of}.txt" for of in ("", "-sky", "-cpu", "-docs")])
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


def test_npms_lock_has_hashes_and_no_place() -> None:
    text = (ROOT / "tests/azurite/package-lock.json").read_text()
    assert '"resolved"' not in text
    assert text.count('"integrity"') == text.count('"node_modules/') > 100
