"""The signatures in docs/api.md are those of the code: what the page shows of a module is compared with its source."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kits.paths_kit import ROOT

PAGE = (ROOT / "docs/api.md").read_text()
BLOCKS = re.findall(r"^<!-- signatures: ([\w.]+) -->\n```python\n(.*?)^```$", PAGE, re.M | re.S)


def shown(node: ast.stmt) -> list[str]:
    """What a page shows of a definition: its arguments, a class's fields and its public methods, and no body."""
    if isinstance(node, ast.ClassDef):
        head = [node.name, *map(ast.unparse, node.bases)]
        return [" ".join(head), *(line for inner in node.body for line in shown(inner))]
    if isinstance(node, ast.FunctionDef) and (node.name == "__init__" or not node.name.startswith("_")):
        kinds = "".join(f"@{ast.unparse(kind)} " for kind in node.decorator_list)
        return [f"{kinds}{node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns) if node.returns else ''}"]
    if isinstance(node, (ast.AnnAssign, ast.Assign)):
        return [ast.unparse(node)]
    return []


@pytest.mark.parametrize(("module", "block"), BLOCKS, ids=[module for module, _ in BLOCKS])
def test_the_page_shows_the_signatures_of_the_code(module: str, block: str) -> None:
    spec = find_spec(module)
    assert spec
    assert spec.origin
    code: dict[str, ast.stmt] = {}
    for node in ast.parse(Path(spec.origin).read_text()).body:
        for target in getattr(node, "targets", [node]):
            code[getattr(target, "name", getattr(target, "id", ""))] = node
    for node in ast.parse(block).body:
        (target,) = getattr(node, "targets", [node])
        assert shown(node) == shown(code[getattr(target, "name", getattr(target, "id", ""))])


def test_every_event_and_exit_code_is_on_the_page() -> None:
    blocks = dict(BLOCKS)
    for module in ("mingpt.observe.events", "mingpt.errors"):
        assert blocks[module], module
    events = ast.parse((ROOT / "mingpt/observe/events.py").read_text()).body
    (union,) = [
        node.value for node in events if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "Event"
    ]
    assert set(re.findall(r"\w+", ast.unparse(union))) <= set(
        re.findall(r"^class (\w+)", blocks["mingpt.observe.events"], re.M)
    )
