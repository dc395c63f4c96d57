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
    "",  # errors: beside the rooms, as __main__
    "cli",
    "files",
    "config",
    "compose",
    "world",
    "model",
    "compute",
    "data",
    "weights",
    "snapshot",
    "tiers",
    "observe",
    "history",
    "train",
    "replay",
    "launch",
    "selftest",
    "preflight",
    "prepare",
    "report",
    "commands",
)
# What a user names, and what names what lies in a room above.
ENTRIES = {"__main__", "cli/cli", "cli/parsers", "cli/data_verbs", "cli/completion"}
FUNCTION_LINES = 60
# What a change costs: what must be read for it, and what it touches. With 3 % of slack, so that no test pins a token.
SLACK = 1.03
STEP, ATTEMPT = "train/step", "train/assemble"
MEASURES = {
    "files that a step can depend on": 23,
    "their tokens": 25_500,
    "files that an attempt can depend on, in % of the package": 51,
    "most imports of one module": 20,
    "tokens of the largest room": 18_000,
    "callables as fields of classes in train/": 1,
    "modules that import redact": 8,
    "files below 150 tokens, but for the empty ones that make a folder a package": 8,
    "comprehensions in 1,000 tokens": 4.3,
    "tokens of the package": 200_000,
}
LEAST_COMMENTS = 4.8  # lines in 1,000 tokens
READING_LISTS = {"Read a step": 8, "Read a snapshot": 5}
LIST_TOKENS = 10_000


# What is loaded by a name in a text, and so has no arrow: code that the command line names, a verb's function, and what
# torch asks for by a name.
BY_NAME = {"cli/cli", "config/plugin", "world/plugins"}

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


SIZES = {name: tokens(text) for name, text in TEXTS.items()}


def closure(module: str) -> set[str]:
    """What a module imports, what those import, and so on; itself, too."""
    seen, todo = set[str](), [module]
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            todo += imports(TREES[name])
    return seen


def callable_fields(tree: ast.AST) -> int:
    return sum(
        isinstance(field, ast.AnnAssign) and "Callable" in ast.unparse(field.annotation)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.decorator_list
        for field in node.body
    )


COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def measured() -> dict[str, float]:
    """By the names of MEASURES."""
    total, step, attempt = sum(SIZES.values()), closure(STEP), closure(ATTEMPT)
    rooms = [sum(size for module, size in SIZES.items() if room(module) == name) for name in ROOMS]
    dense = sum(isinstance(node, COMPREHENSIONS) for tree in TREES.values() for node in ast.walk(tree))
    values = (
        len(step),
        sum(SIZES[name] for name in step),
        100 * sum(SIZES[name] for name in attempt) / total,
        max(len({*imports(tree)}) for tree in TREES.values()),
        max(rooms),
        sum(callable_fields(tree) for name, tree in TREES.items() if room(name) == "train"),
        sum("cli/redact" in imports(tree) for tree in TREES.values()),
        sum(0 < size < 150 for size in SIZES.values()),
        1000 * dense / total,
        total,
    )
    return dict(zip(MEASURES, values, strict=True))


def test_what_a_change_costs_does_not_grow() -> None:
    """A limit that is no longer needed is taken down."""
    assert {name: value for name, value in measured().items() if value > MEASURES[name] * SLACK} == {}


def test_the_why_stands_beside_the_line() -> None:
    comments = sum(line.strip().startswith("#") for text in TEXTS.values() for line in text.splitlines())
    assert 1000 * comments / sum(SIZES.values()) > LEAST_COMMENTS / SLACK


@pytest.mark.parametrize("heading", READING_LISTS)
def test_a_reading_list_is_short(heading: str) -> None:
    text = (PACKAGE / "README.md").read_text().split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    names = [name.removesuffix(".py") for name in re.findall(r"`([\w/]+\.py)`", text)]
    assert len(names) == len({*names}) == READING_LISTS[heading]
    assert sum(SIZES[name] for name in names) <= LIST_TOKENS


# A file that a text names, and perhaps what it defines: `tree.py`, `tree.py: middle`, `tree.py`: `middle` and `cuts`.
FILE = re.compile(r"(?<![\w/.])([\w/*]+\.py)\b(?:: ([\w.]*\w)(?=[`,.;)]|$)|`: ((?:(?:, |,? and )?`[\w.]+`)+))?", re.M)
OTHERS = {"torch.py", "encoder.py", "dynamic_rendezvous.py"}  # not ours


def said_in(module: str) -> str:
    """The docstrings and comments of a module."""
    nodes = [n for n in ast.walk(TREES[module]) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    found = tokenize.generate_tokens(io.StringIO(TEXTS[module]).readline)
    comments = [token.string for token in found if token.type == tokenize.COMMENT]
    return "\n".join([*(ast.get_docstring(node) or "" for node in nodes), *comments])


def defines(tree: ast.AST, name: str) -> bool:
    """Whether a file defines a name, or a class in it the member `Class.name`."""
    outer, _, inner = name.rpartition(".")
    if outer:
        classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == outer]
        return any(defines(node, inner) for node in classes)
    stored = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            stored.add(node.name)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            stored.add(node.id if isinstance(node, ast.Name) else node.attr)
    return name in stored


def not_there(text: str, *folders: Path) -> list[str]:
    """The files that a text names and that are in none of the folders, and the names that their files do not define."""
    wrong = list[str]()
    for path, inside, after in FILE.findall(text):
        files = [file for folder in folders for file in folder.glob(path)]
        if not files and path not in OTHERS:
            wrong.append(path)
        names = [*filter(None, [inside]), *re.findall(r"`([\w.]+)`", after)]
        for name in names if files else ():
            if not defines(ast.parse(files[0].read_text()), name):
                wrong.append(f"{path}: {name}")
    return wrong


def test_files_that_the_map_and_the_code_name_are_there() -> None:
    """A file without a folder is one of the same room."""
    assert not_there((PACKAGE / "README.md").read_text(), PACKAGE, PACKAGE.parent) == []
    wrong = {name: not_there(said_in(name), (PACKAGE / name).parent, PACKAGE, PACKAGE.parent) for name in TEXTS}
    assert {name: files for name, files in wrong.items() if files} == {}


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
