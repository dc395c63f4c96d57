"""`python tests/mutations/run.py [NAME …]`: break the code in one place at a time, and see that the tests notice.

mutations.yaml names a snippet, what replaces it, and the tests that catch that. Each mutation is made in a copy of the
checkout. The round fails if a snippet is not there exactly once, if no test is run, or if all tests pass.
"""

import argparse
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
    """file: below the checkout. old: what stands there once. tests: files and folders. target: of make, see MARKS."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    target: str = "test"


def read(path: Path = TABLE) -> list[Mutation]:
    rows = yaml.safe_load(path.read_text())
    return [Mutation(**row | {"tests": tuple(row["tests"].split())}) for row in rows]


def mutated(text: str, mutation: Mutation) -> str:
    """Raises ValueError if the snippet is not there, or more than once."""
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.file} has the snippet of “{mutation.name}” {count} times: carry it along")
    return text.replace(mutation.old, mutation.new)


def copy(folder: Path) -> None:
    """The files that git knows, as they are now."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def attempt(mutation: Mutation, folder: Path) -> str:
    """What the tests said: `caught by TEST`, or what is wrong."""
    file = folder / mutation.file
    text = file.read_text()
    try:
        file.write_text(mutated(text, mutation))
    except ValueError as problem:
        return str(problem)
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
