"""The locks: pip, whose version they have, installs nothing that has not one of their hashes."""

import re

import pytest

from tests.kits.paths_kit import ROOT


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
