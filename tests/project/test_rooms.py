"""The house: arrows between rooms point down, no function is long, and who reads the core has to read little."""

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import mingpt

PACKAGE = Path(mingpt.__file__).parent
# From the ground up: a room imports from itself and from those before it.
ROOMS = (
    "",  # errors, redact, storage, …: the files beside the rooms
    "config",
    "world",
    "model",
    "compute",
    "data",
    "weights",
    "snapshot",
    "observe",
    "train",
    "launch",
    "selftest",
    "preflight",
    "prepare",
    "report",
    "commands",
)
# `mingpt VERB` and `python -m` name commands; what they start lies in a room above them.
ENTRIES = {"__main__", "cli", "completion", "evaluate", "generate", "replay", "snapshots", "plugins", "metrics",
           "train/__main__",            "data/fetch", "data/prepare"}  # fmt: skip
READING_PATH = (
    "train/loop",
    "train/step",
    "train/stats",
    "model/gpt2",
    "model/language",
    "compute/batches",
    "compute/buckets",
    "compute/tree",
    "compute/reduction",
    "compute/optimizer",
    "compute/guard",
    "world/world",
    "snapshot/format",
)
BEYOND = {
    "errors",
    "config/kinds",
    "config/schema",
    "config/section",
    "compute/groups",
    "compute/muon",
    "compute/exchange",
    "compute/narrow",
}  # what these may import besides each other
LONGEST_PATH = 14_000  # tokens
LONGEST_FUNCTION = 60


@cache
def modules() -> dict[str, ast.Module]:
    """Each file of the package by its path without `.py`."""
    return {p.relative_to(PACKAGE).with_suffix("").as_posix(): ast.parse(p.read_text()) for p in PACKAGE.rglob("*.py")}


def imports(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """The package's own modules that are imported, at the top or later; not what only a type checker imports."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "mingpt":
            module = "/".join(node.module.split(".")[1:])
            for name in node.names:
                inner = f"{module}/{name.name}" if module else name.name
                if inner in known or module:
                    yield inner if inner in known else module
        elif isinstance(node, ast.Import):
            yield from ("/".join(n.name.split(".")[1:]) for n in node.names if n.name.startswith("mingpt."))
        yield from imports(node, known)


def room(module: str) -> str:
    return module.split("/")[0] if "/" in module or (PACKAGE / module).is_dir() else ""


def test_arrows_between_rooms_point_down() -> None:
    files = modules()
    rank = {name: i for i, name in enumerate(ROOMS)}
    up = [
        f"{module} imports {other}"
        for module, tree in files.items()
        if module not in ENTRIES
        for other in imports(tree, set(files))
        if rank[room(other)] > rank[room(module)]
    ]
    assert up == []


# What is loaded by a name in a text, and so has no arrow: kinds of models and data (their modules are named in
# config/kinds, which knows nothing else of them), code that the command line names, a command's own module, and what
# torch asks for by a name.
BY_NAME = {"cli", "command", "completion", "config/kinds", "config/plugin", "plugins", "world/entry"}


def test_only_what_is_known_is_loaded_by_name() -> None:
    found = {
        module
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__"))
    }
    assert found == BY_NAME


LAYOUT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER"}


def tokens(text: str) -> int:
    """How many there are in a module, so that dense lines and missing comments gain nothing; docstrings are free."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, holders) and ast.get_docstring(node) is not None
    }
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(tokenize.tok_name[t.type] not in LAYOUT and t.start not in docs for t in found)


def test_the_reading_path_is_short_and_needs_nothing_beside_it() -> None:
    files = modules()
    sizes = {name: tokens((PACKAGE / f"{name}.py").read_text()) for name in READING_PATH}
    assert sum(sizes.values()) <= LONGEST_PATH, sizes
    beyond = {
        f"{module} imports {other}"
        for module in READING_PATH
        for other in imports(files[module], set(files))
        if other not in {*READING_PATH, *BEYOND}
    }
    assert beyond == set()


def test_no_modules_import_each_other() -> None:
    """At their tops or later: what is reached from a module does not lead back to it."""
    arrows = {module: set(imports(tree, set(modules()))) for module, tree in modules().items()}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as circle:
        pytest.fail(" imports ".join(reversed(circle.args[1])))


def test_no_function_is_long() -> None:
    long = {
        f"{module}.{node.name}": lines
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION
    }
    assert long == {}
