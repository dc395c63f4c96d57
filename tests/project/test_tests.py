"""The tests themselves: where they lie, and what their README says of the kits."""

from pathlib import Path

import mingpt
from tests.kits.paths_kit import ROOT


def rooms(folder: Path) -> set[str]:
    return {file.parent.name for file in folder.glob("*/*.py") if file.stem != "__init__"}


def test_each_room_of_the_package_has_its_room_of_tests() -> None:
    tested = {file.parent.name for file in (ROOT / "tests").glob("*/test_*.py")}
    assert rooms(Path(mingpt.__file__).parent) - tested == set()
