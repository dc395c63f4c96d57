"""What the code of somebody's own is made of: the files that a module imports, read and never run.

Only files below the folder that the module's top-level package lies in count: the user's own. Packages that are
installed have versions, and this package has `numerics.NUMERICS`.
"""

import ast
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec, resolve_name
from pathlib import Path

import mingpt

HERE = Path(mingpt.__file__).resolve().parent
INSTALLED = {"site-packages", "dist-packages"}


def installed(package: str) -> bool:
    """Whether it can be imported. A folder of that name is no package: W&B and MLflow make such ones where they run."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def version_of(distribution: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def search_here_too() -> None:
    """Let the user's own code be found in the current folder: last, so that no file in it shadows a package."""
    here = os.getcwd()
    if not getattr(sys.flags, "safe_path", sys.flags.isolated) and not {"", here} & {*sys.path}:
        sys.path.append(here)


def imported_sha256(target: str) -> str | None:
    """The sha256 of the user's files that the module of a dotted path needs, but its own; None if there are none."""
    module_name = target.rpartition(".")[0]
    top = module_name.partition(".")[0]
    search_here_too()
    for entry in sys.path:
        root = Path(entry or ".").resolve()
        if (root / top).is_dir() or (root / f"{top}.py").is_file():
            break
    else:
        return None
    if not _is_own(root / top):
        return None
    files = _files_of(root, module_name)
    files.pop(module_name, None)
    lines = [f"{name} {sha256(path.read_bytes()).hexdigest()}\n" for name, path in sorted(files.items())]
    return sha256("".join(lines).encode()).hexdigest() if lines else None


def _is_own(path: Path) -> bool:
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    return not (INSTALLED & set(path.parts) or path.is_relative_to(standard) or path.is_relative_to(HERE))


def _files_of(root: Path, module_name: str) -> dict[str, Path]:
    """The module's own file and those of all modules that it needs, whose names lead to files below root."""
    found: dict[str, Path] = {}
    pending = [module_name]
    while pending:
        name = pending.pop()
        parts = name.split(".")
        if len(parts) > 1:  # importing a module imports the packages that it is in
            pending.append(name.rpartition(".")[0])
        path = root.joinpath(*parts, "__init__.py")
        if not path.is_file():
            path = root.joinpath(*parts[:-1], f"{parts[-1]}.py")
        if name in found or not path.is_file() or not _is_own(path):
            continue
        found[name] = path
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        pending += _names_in(path, package)
    return found


def _names_in(path: Path, package: str) -> Iterator[str]:
    """Every module that a file may import: `from a import b` may mean a module a.b."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # a relative import that leads out of its package
                base = resolve_name("." * node.level + (node.module or ""), package)
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
