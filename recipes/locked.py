"""Installs the packages of a lock file and nothing else. An archive without one of its hashes is never unpacked or run.

    PYTHON recipes/locked.py constraints.txt -e '.[dev]'        # this project, editable; without -e: a copy
    PYTHON recipes/locked.py constraints-sky.txt 'skypilot[aws,slurm]'

It installs into the environment of PYTHON; `--uv PROGRAM` uses uv instead of pip. Neither does this in one call: with
--require-hashes all requirements must be listed, so the whole lock would be installed, CUDA beside a torch for CPUs,
too. So this program follows the requirements itself, in the metadata of packages that are installed and verified.
"""

import argparse
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "mingpt-exact"  # of pyproject.toml
# Other builds of packages in a lock. Each is preferred if pip is set up to find it (PyPI has none).
BUILDS = ROOT / "constraints-cpu.txt"
# These are installed first: they read requirements, and build packages that come as source. Builds are not isolated,
# since an isolated build's tools are fetched without hashes.
TOOLS = ("packaging", "pip", "setuptools", "hatchling")
INSTALL_SECONDS = 3600


class LockError(Exception):
    """Says what is wrong, and what to do."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read(path: Path) -> dict[str, list[str]]:
    """The entries of each name: one, or several for different machines, among which pip and uv choose."""
    lock: dict[str, list[str]] = {}
    for entry in re.split(r"\n(?![ #])", path.read_text()):
        lines = [line for line in entry.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        if not lines:
            continue
        if " --hash=" not in entry:
            raise LockError(
                f"{path.name}: {lines[0]!r} has no hash: make the lock anew, by the command in its first lines"
            )
        lock.setdefault(normal(re.split(r"[^\w.-]", lines[0], maxsplit=1)[0]), []).append("\n".join(lines))
    return lock


class Installer:
    def __init__(self, path: Path, uv: str | None) -> None:
        self.path, self.uv = path, uv
        self.lock, self.builds = read(path), read(BUILDS)

    def run(self, arguments: list[str], may_fail: bool = False) -> bool:
        head = [self.uv, "pip", "install", "--python", sys.executable] if self.uv else [sys.executable, "-m", "pip"]
        head += [] if self.uv else ["install", "--disable-pip-version-check"]
        command = [*head, "--quiet", "--no-deps", "--no-build-isolation", *arguments]
        code = subprocess.run(command, cwd=ROOT, timeout=INSTALL_SECONDS, capture_output=may_fail).returncode
        importlib.invalidate_caches()
        if code and not may_fail:
            raise LockError(f"{' '.join(command)}\nended with exit code {code}; the reason is above")
        return code == 0

    def install(self, names: list[str]) -> None:
        """Install these and no others, unless they are installed already."""
        wanted = []
        for name in names:
            if name not in self.lock:
                raise LockError(
                    f"{self.path.name} has no {name}: make the lock anew, by the command in its first lines"
                )
            if version_of(name) in [entry.split("==")[1].split()[0] for entry in self.lock[name]]:
                continue
            if name not in self.builds or not self.install_entries(self.builds[name], may_fail=True):
                wanted += self.lock[name]
        if wanted:
            self.install_entries(wanted)

    def install_entries(self, entries: list[str], may_fail: bool = False) -> bool:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(entries) + "\n")
            file.flush()
            return self.run(["--require-hashes", "-r", file.name], may_fail)

    def follow(self, *roots: str) -> None:
        """Install what these need, and what that needs, until nothing is missing."""
        from packaging.requirements import Requirement  # from the lock, and perhaps just installed

        found = [Requirement(root) for root in roots]
        done: set[tuple[str, str]] = set()
        while found:
            names = sorted({normal(r.name) for r in found})
            self.install([name for name in names if name != PROJECT])
            for requirement in found:
                self.check(requirement)
            todo = {(normal(r.name), extra) for r in found for extra in ("", *r.extras)} - done
            done |= todo
            found = [r for name, extra in sorted(todo) for r in needed(name, extra)]

    def check(self, requirement: Any) -> None:
        version = version_of(normal(requirement.name))
        if version and not requirement.specifier.contains(version, prereleases=True):
            raise LockError(
                f"{self.path.name} has {requirement.name} {version}, and {requirement} is needed: make the lock anew"
            )


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name).partition("+")[0]  # 2.13.0+cpu is a build of 2.13.0
    except importlib.metadata.PackageNotFoundError:
        return None


def needed(name: str, extra: str) -> list[Any]:
    """The requirements of an installed package on this machine, for one of its extras, or for none ("")."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires(name) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []  # the lock's markers exclude it on this machine
    return [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": extra})]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Install what a lock says, each archive verified by its hash.")
    parser.add_argument("lock", type=Path)
    parser.add_argument("-e", "--editable", action="store_true", help="this project as links to its files")
    parser.add_argument("--uv", metavar="PROGRAM", help="instead of pip")
    parser.add_argument("roots", nargs="+", metavar="NAME[EXTRAS]", help="a package of the lock, or . for this project")
    args = parser.parse_args(argv)
    if sys.prefix == sys.base_prefix:
        print(f"error: {sys.executable} is no virtual environment's: python3 -m venv .venv", file=sys.stderr)
        return 64
    try:
        installer = Installer(args.lock, args.uv)
        tools = [tool for tool in TOOLS if tool in installer.lock]
        installer.install(tools)
        installer.follow(*tools)
        roots = [root.replace(".", PROJECT, 1) if root[0] == "." else root for root in args.roots]
        if roots != args.roots:
            installer.run(["-e", "."] if args.editable else ["."])
        installer.follow(*roots)
    except (LockError, OSError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
