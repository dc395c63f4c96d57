"""Each bug of mutations.yaml can still be made, and the tests that must see it are there: run.py makes it."""

import ast

from tests.kits.paths_kit import ROOT
from tests.mutations.run import broken, read


def test_each_mutation_can_be_made() -> None:
    """However the code around it is written, and wherever in the package its definition lies."""
    for mutation in read():
        file, text = broken(ROOT, mutation)
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(file.read_text())), mutation.name
        assert [test for test in mutation.tests if not (ROOT / test).exists()] == [], mutation.name
