"""The wording of mistakes stands in tests/messages.txt, under the name of the test that causes each, and nowhere else.

A test asserts the exit code and the key or place that a message names; `told(text, tmp_path)` compares the whole text
with the file. `pytest --write-messages …` writes what these tests were told into it, to be reviewed as text.
"""

import fcntl
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mingpt.cli.redact import redacted
from mingpt.errors import UserError

MESSAGES = Path(__file__).parents[1] / "messages.txt"


def entries() -> dict[str, str]:
    """All texts of the file, by their names."""
    parts = re.split(r"^== (.*)\n", MESSAGES.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


class Told:
    """Compares, or writes, the texts of one test: the first under its name, others with a number behind it."""

    def __init__(self, test: str, write: bool) -> None:
        self.test, self.write, self.count = test, write, 0

    def __call__(self, text: str | Iterable[str], *places: object) -> None:
        """text: or its lines. places: what differs from run to run, such as tmp_path; an ellipsis stands for it."""
        if not isinstance(text, str):
            text = "\n".join(text)
        text = str(redacted(text))  # as the console does: the file has what people read
        for place in sorted(map(str, places), key=len, reverse=True):
            text = text.replace(place, "…")
        text = text.rstrip("\n") + "\n"
        self.count += 1
        name = self.test if self.count == 1 else f"{self.test} {self.count}"
        if self.write:
            _write(name, text)
        known = entries().get(name)
        assert text == known, f"told:\n{text}\nin tests/messages.txt, which pytest --write-messages writes:\n{known}"

    @contextmanager
    def mistake(self, *places: object, of: type[Exception] = UserError) -> Iterator[None]:
        """What is raised inside, which must be just this, is told."""
        with pytest.raises(of) as error:
            yield
        self(str(error.value), *places)


def _write(name: str, text: str) -> None:
    with MESSAGES.open("a") as lock:  # several processes test
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = sorted((entries() | {name: text}).items())
        MESSAGES.write_text("".join(f"== {name}\n{text}" for name, text in told))
