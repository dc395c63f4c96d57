"""The house: arrows between rooms point down, no function is long, and who reads the core has to read little."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
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
    "history",
    "train",
    "launch",
    "selftest",
    "preflight",
    "prepare",
    "report",
    "commands",
)
# What a user names, and what names what lies in a room above.
ENTRIES = {"cli", "parsers", "completion", "plugins", "metrics"}
PACKAGE_TOKENS, PACKAGE_FILES, FUNCTION_LINES = 206_500, 221, 60
ROOM_TOKENS = {
    "": 12_793,
    "commands": 15_967,
    "compute": 17_057,
    "config": 19_023,
    "data": 18_201,
    "history": 3_049,
    "launch": 5_636,
    "model": 6_062,
    "observe": 12_006,
    "preflight": 7_353,
    "prepare": 7_821,
    "report": 9_725,
    "selftest": 2_440,
    "snapshot": 21_059,
    "train": 28_927,
    "weights": 4_666,
    "world": 15_352,
}
PATH_TOKENS = 32_450
# What a file of the reading path may import besides the others of the path: errors, and the schema's classes.
SCHEMA = {"errors", "config/kinds", "config/schema", "config/section"}
# Of these the path has what a reader needs to know, and their rooms have the rest. How many other files they import:
OPEN_ENDS = {"snapshot/checkpointer", "snapshot/writer", "snapshot/store", "train/assemble"}
OPEN_IMPORTS = 32


# What is loaded by a name in a text, and so has no arrow: kinds of models and data (their modules are named in
# config/kinds, which knows nothing else of them), code that the command line names, a verb's function, and what torch
# asks for by a name.
BY_NAME = {"cli", "config/kinds", "config/plugin", "plugins"}

# Each file of the package by its path without `.py`.
TEXTS = {p.relative_to(PACKAGE).with_suffix("").as_posix(): p.read_text() for p in PACKAGE.rglob("*.py")}
TREES = {name: ast.parse(text) for name, text in TEXTS.items()}


def imports(tree: ast.AST, typing: bool = False) -> Iterator[str]:
    """The package's own modules that are imported, at the top or later. typing: also what a type checker imports."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not typing:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                inner = f"{node.module}.{name.name}".replace(".", "/").removeprefix("mingpt/")
                outer = inner.rpartition("/")[0]
                yield from [module for module in (inner, outer) if module in TREES][:1]
        elif isinstance(node, ast.Import):
            yield from ("/".join(n.name.split(".")[1:]) for n in node.names if n.name.startswith("mingpt."))
        yield from imports(node, typing)


def room(module: str) -> str:
    return module.split("/")[0] if "/" in module or (PACKAGE / module).is_dir() else ""


def test_arrows_between_rooms_point_down() -> None:
    rank = {name: i for i, name in enumerate(ROOMS)}
    up = [
        f"{module} imports {other}"
        for module, tree in TREES.items()
        if module not in ENTRIES
        for other in imports(tree)
        if rank[room(other)] > rank[room(module)]
    ]
    assert up == []


def test_only_what_is_known_is_loaded_by_name() -> None:
    assert {module for module, text in TEXTS.items() if re.search(r"import_module\(|__import__\(", text)} == BY_NAME


LAYOUT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER"}


def tokens(text: str) -> int:
    """How many there are in a module, so that dense lines and missing comments gain nothing; docstrings are free."""
    docs = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
    }
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(tokenize.tok_name[t.type] not in LAYOUT and t.start not in docs for t in found)


def reading_path() -> list[str]:
    """The files that README.md lists."""
    text = (PACKAGE / "README.md").read_text().split("## Read it in this order", 1)[1]
    return [
        name.removesuffix(".py")
        for name in re.findall(r"`([\w/]+\.py)`", text.split("\n## ", 1)[0])
        if "tests/" not in name
    ]


def test_the_package_and_its_rooms_do_not_grow() -> None:
    """A limit that is no longer needed is taken down."""
    found = {name: tokens(text) for name, text in TEXTS.items()}
    assert sum(found.values()) <= PACKAGE_TOKENS
    assert len(TEXTS) <= PACKAGE_FILES
    rooms = {name: sum(size for module, size in found.items() if room(module) == name) for name in ROOMS}
    assert {name: size for name, size in rooms.items() if size > ROOM_TOKENS[name]} == {}


def test_the_reading_path_is_short_and_needs_nothing_beside_it() -> None:
    path = reading_path()
    assert len(path) == len({*path}) == 21
    assert sum(tokens(TEXTS[name]) for name in path) <= PATH_TOKENS
    beyond = {module: {*imports(TREES[module], typing=True)} - {*path} - SCHEMA for module in path}
    assert {module for module, others in beyond.items() if others} <= OPEN_ENDS
    assert len(set().union(*beyond.values())) <= OPEN_IMPORTS


def test_no_modules_import_each_other() -> None:
    """At their tops or later: what is reached from a module does not lead back to it."""
    arrows = {module: set(imports(tree)) for module, tree in TREES.items()}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as circle:
        pytest.fail(" imports ".join(reversed(circle.args[1])))


def test_no_function_is_long() -> None:
    long = {
        f"{module}.{node.name}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES
    }
    assert long == set()
