"""Executes the ```console blocks of a page of docs/, in order, and compares what is printed with what the page shows.

`$ command` begins a command; `…` alone on a line stands for any lines, at a line's end for the rest of it. What follows
from the machine is masked: digests, numbers with a point, hosts, how far columns are apart.
"""

import contextlib
import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import lockstep
import mingpt.cli
from paths_kit import ROOT

LIMIT = 600  # seconds for one command
MASKS = (
    (r"[0-9a-f]{16,}", "#"),
    (r"-?\b\d+\.\d+(e[+-]?\d+)?", "#"),
    (r"-?\b\d+e[+-]\d+\b", "#"),
    (r"steps: \d+ are in both", "steps: # are in both"),  # a killed attempt may have done another one
    (r"the first on .* \(", "the first on # ("),
    (r"#( ±)? s\b|\b\d+ s\b", "# s"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\dZ?", "#"),
    (r" +", " "),
    (r"# at \d+ \(sample [\d,]+\) .*", "# at # (sample #) #"),
)


def commands(page: Path) -> list[list[str]]:
    """Each command of a page, and the lines below it."""
    found = list[list[str]]()
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.M | re.S):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append([])
            found[-1].append(line.removeprefix("$ "))
    return found


def masked(line: str) -> str:
    for pattern, put in MASKS:
        line = re.sub(pattern, put, line)
    return line.rstrip()


def pattern(shown: list[str]) -> str:
    """What the printed lines match."""
    parts = []
    for line in shown:
        start, rest = line.removesuffix("…"), ".*" if line.endswith("…") else ""
        parts.append(r"(?:.*\n)*?" if line.strip() == "…" else re.escape(masked(start)) + rest + r"\n")
    return "".join(parts)


class Shell:
    """Runs commands of a page in the current folder. before: what a comment (`# text`) asks for before its command."""

    def __init__(self, before: dict[str, Callable[[], object]] | None = None) -> None:
        self.before, self.code = before or {}, 0

    def run(self, command: str) -> list[str]:
        command, _, comment = (text.strip() for text in command.partition("  #"))
        if comment in self.before:
            self.before[comment]()
        if command == "echo $?":
            return [str(self.code)]
        command, _, into = (text.strip() for text in command.partition(" > "))
        program, verb, *arguments = shlex.split(command)
        assert program == "mingpt", command
        if verb in ("train", "launch"):
            killed = re.fullmatch(r"killed at step (\d+)", comment)
            return self._train(verb, arguments, int(killed[1]) if killed else None)
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                self.code = mingpt.cli.run(verb, arguments)
            except SystemExit as end:
                self.code = int(end.code or 0)
        if into:
            Path(into).write_text(out.getvalue())
        return [] if into else out.getvalue().splitlines()

    def _train(self, verb: str, arguments: list[str], kill_at: int | None) -> list[str]:
        """In processes of their own."""
        process = lockstep.start(
            [sys.executable, "-m", f"mingpt.{verb}", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        printed = []
        assert process.stdout
        for line in process.stdout:
            printed.append(line.rstrip("\n"))
            if kill_at is not None and re.match(rf"step +{kill_at}/", line):
                os.killpg(process.pid, signal.SIGKILL)
        self.code = process.wait(LIMIT)
        return printed


def differences(commands: list[list[str]], shell: Shell) -> str:
    """Execute these; each whose output is not as shown, with what it printed."""
    wrong = []
    for command, *shown in commands:
        printed = shell.run(command)
        if not re.fullmatch(pattern(shown), "".join(f"{masked(line)}\n" for line in printed)):
            wrong += [f"$ {command}", *printed, "--- but the page shows:", *shown, ""]
    return "\n".join(wrong)
