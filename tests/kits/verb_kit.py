"""`mingpt VERB …` in this process: what it printed, how it ended, and what it has made."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from mingpt import cli
from mingpt.snapshot.store import Store
from mingpt.world.lifetime import Lifetime


def store(run: object = "run") -> Store:
    """The snapshots of a run."""
    return Store(f"{run}/snapshots")


@dataclass
class Mingpt:
    """mingpt("snapshots list", folder) returns what it printed; `err` has its errors. It has to end with `code`.

    The first argument is split into words, the others are taken as they are.
    """

    capsys: pytest.CaptureFixture[str]
    out: str = ""
    err: str = ""

    def __call__(self, words: str, *more: object, code: int = 0) -> str:
        ended = self.ends(words, *more)
        assert ended == code, (ended, self.out, self.err)
        return self.out

    def json(self, words: str, *more: object, code: int = 0) -> Any:
        return json.loads(self(f"{words} --json", *more, code=code))

    def refused(self, words: str, *more: object, code: int = 64) -> str:
        """The errors of one that prints nothing else."""
        assert self(words, *more, code=code) == ""
        return self.err

    def ends(self, words: str, *more: object) -> int:
        self.capsys.readouterr()
        verb, *arguments = [*words.split(), *map(str, more)]
        if verb == "evaluate":  # which ends its process
            from mingpt.commands.evaluate import command

            ended = command(arguments, Lifetime())
        else:
            ended = cli.run(verb, arguments)
        self.out, self.err = self.capsys.readouterr()
        return ended
