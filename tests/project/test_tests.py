"""The tests themselves: where they lie, and what there is to read of the kits."""

import ast
import re
from pathlib import Path

import pytest

import mingpt
from tests.kits.paths_kit import KITS, ROOT

KIT_FILES = [file for file in sorted(KITS.glob("*.py")) if file.stem != "__init__"]


def test_each_room_of_the_package_has_its_room_of_tests() -> None:
    rooms = {file.parent.name for file in Path(mingpt.__file__).parent.glob("*/*.py")}
    tested = {file.parent.name for file in (ROOT / "tests").glob("*/test_*.py")}
    assert rooms - tested == set()


def test_the_readme_names_all_kits_once() -> None:
    table = (ROOT / "tests/README.md").read_text().split("| kit | for |\n|---|---|\n")[1]
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(["crash_site", *(file.stem for file in KIT_FILES)])


@pytest.mark.parametrize("file", KIT_FILES, ids=lambda file: file.stem)
def test_a_kit_says_what_it_is_for_and_each_part_what_it_does(file: Path) -> None:
    tree = ast.parse(file.read_text())
    public = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name[0] != "_"]
    assert ast.get_docstring(tree)
    assert [node.name for node in public if not ast.get_docstring(node)] == []
