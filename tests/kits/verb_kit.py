"""`mingpt VERB …` in this process: what it printed, how it ended, and what it has made."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from mingpt.cli import cli
from mingpt.snapshot.format import Manifest
from mingpt.snapshot.reader import verify
from mingpt.snapshot.store import Store
from mingpt.world.lifetime import Lifetime


def store(run: object = "run") -> Store:
    """The snapshots of a run."""
    return Store(f"{run}/snapshots")


def verified(run: object, step: int) -> Manifest:
    """Of a snapshot, every byte of which has its checksum."""
    return verify(store(run), step)


class Mingpt:
    """mingpt("snapshots list", folder) returns what it printed; `err` has its errors. It has to end with `code`.

    The first argument is split into words, the others are taken as they are.
    """

    out = err = ""

    def __call__(self, words: str, *more: object, code: int = 0) -> str:
        ended = self.ends(words, *more)
        assert ended == code, f"exit code {ended}: {words}\n{self.out}{self.err}"
        return self.out

    def json(self, words: str, *more: object, code: int = 0) -> Any:
        return json.loads(self(f"{words} --json", *more, code=code))

    def refused(self, words: str, *more: object, code: int = 64) -> str:
        """The errors of one that prints nothing else."""
        assert self(words, *more, code=code) == ""
        return self.err

    def ends(self, words: str, *more: object) -> int:
        """The exit code."""
        verb, *arguments = [*words.split(), *map(str, more)]
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            ended = cli.run(verb, arguments, Lifetime())
        self.out, self.err = out.getvalue(), err.getvalue()
        return ended


mingpt = Mingpt()
