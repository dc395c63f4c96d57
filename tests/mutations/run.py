"""`python tests/mutations/run.py [NAME …]`: break the code in one place at a time, and see that the tests notice.

mutations.yaml names a definition, an expression or a statement in it, what replaces that, and the tests that catch it.
Each mutation is made in a copy of the checkout. The round fails if the code can't be broken so (test_mutations.py, a
fast test, sees that, too), if no test is run, or if all tests pass.
"""

import argparse
import ast
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import yaml

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("mutations.yaml")
MARKS = {"test": "example or not (lab or slow)", "test-all": "not lab"}  # which tests each target of make runs
SECONDS = 1200  # a mutated program may hang; that counts as caught
FAILED = 1  # pytest's exit code if a test has failed; others: no test was run


@dataclass(frozen=True)
class Mutation:
    """name: what is wrong then. tests: files and folders. target: of make, see MARKS.

    module and definition: as in `mingpt.snapshot.store:Store.commit`; a function, a class, or a name of a value. One
    that has moved to another file is found there. old: Python that is in it once. new: what replaces it.
    """

    name: str
    module: str
    definition: str
    old: str
    new: str
    tests: tuple[str, ...]
    target: str = "test"


def read(path: Path = TABLE) -> list[Mutation]:
    mutations = []
    for row in yaml.safe_load(path.read_text()):
        module, definition = row["in"].split(":")
        tests = tuple(row["tests"].split())
        target = row.get("target", "test")
        mutations.append(Mutation(row["name"], module, definition, row["break"], row["into"], tests, target))
    return mutations


def defined(tree: ast.AST, name: str) -> list[ast.AST]:
    """The definitions of a name, as `Store.commit` is one, in a module or another definition."""
    first, _, rest = name.partition(".")
    found = list[ast.AST]()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if node.name == first:
                found += defined(node, rest) if rest else [node]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if not rest and first in (ast.unparse(target) for target in targets):
                found.append(node)
        elif isinstance(node, ast.stmt):  # an if, or a with
            found += defined(node, name)
    return found


def broken(root: Path, mutation: Mutation) -> tuple[Path, str]:
    """The file of a checkout that has the definition, and its new text.

    Raises ValueError if what is to be replaced is not in the definition exactly once.
    """
    own = root.joinpath(*mutation.module.split(".")).with_suffix(".py")
    old, new = ast.parse(mutation.old).body[0], ast.parse(mutation.new).body[0]
    exchange = Exchange(old, new)
    if isinstance(old, ast.Expr) and isinstance(new, ast.Expr):
        exchange = Exchange(old.value, new.value)
    for files in ([own] if own.exists() else [], sorted(root.glob("mingpt/**/*.py"))):
        trees = {file: ast.parse(file.read_text()) for file in files}
        found = [(file, node) for file, tree in trees.items() for node in defined(tree, mutation.definition)]
        changed = [file for file, definition in found if exchange.makes_one_in(definition)]
        if found:
            break
    if exchange.count != 1:
        raise ValueError(f"“{mutation.name}”: {exchange.count} x “{mutation.old}” in {mutation.definition}")
    return changed[0], ast.unparse(ast.fix_missing_locations(trees[changed[0]]))


class Exchange(ast.NodeTransformer):
    """Replaces what is the same Python as `old`, however it is written, and counts it."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new, self.count = ast.dump(old), new, 0

    def makes_one_in(self, definition: ast.AST) -> bool:
        before = self.count
        self.visit(definition)
        return self.count > before

    def visit(self, node: ast.AST) -> ast.AST:
        if ast.dump(node) == self.old:
            self.count += 1
            return self.new
        return self.generic_visit(node)


def copy(folder: Path) -> None:
    """The files that git knows, as they are now."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def attempt(mutation: Mutation, folder: Path) -> str:
    """What the tests said: `caught by TEST`, or what is wrong."""
    try:
        file, code = broken(folder, mutation)
    except ValueError as problem:
        return str(problem)
    text = file.read_text()
    file.write_text(code)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-rfE",
        "-p",
        "no:cacheprovider",
        "-m",
        MARKS[mutation.target],
    ]
    try:
        done = subprocess.run([*command, *mutation.tests], cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "caught by a hang"
    finally:
        file.write_text(text)
    if done.returncode != FAILED:
        return "NOT CAUGHT" if done.returncode == 0 else f"no test was run: {done.stdout[-300:]}"
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return f"caught by {failed[0] if failed else 'an error'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="words of the names (default: all)")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    chosen = [m for m in read() if not options.names or any(word in m.name for word in options.names)]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        folders = SimpleQueue[Path]()
        for number in range(options.jobs):
            copy(Path(scratch, str(number)))
            folders.put(Path(scratch, str(number)))

        def one(mutation: Mutation) -> bool:
            folder = folders.get()
            try:
                said = attempt(mutation, folder)
            finally:
                folders.put(folder)
            print(f"{mutation.target:<9} {mutation.name}: {said}", flush=True)
            return said.startswith("caught")

        caught = list(pool.map(one, chosen))
    print(f"{sum(caught)} passed, {len(caught) - sum(caught)} failed")
    return int(not all(caught))


if __name__ == "__main__":
    sys.exit(main())
