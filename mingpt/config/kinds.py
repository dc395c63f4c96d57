"""What every kind of model and of data declares: a section of the config, whose class says all that is known of it.

Of a config nothing is built or opened here: that is for the rooms above (`model/building.py`, `data/opening.py`), so a
config is judged without torch. To add a kind: its class in models.py or datasets.py, a place in keys.py: KINDS, and
what builds or opens it in the room.
"""

import re
from typing import Annotated, ClassVar

from pydantic import Field

from mingpt.config.section import NO_RESULT, Section

CACHE_DIR = "~/.cache/mingpt"  # of this machine: what data, and torch's compiler, need not make again


class Kind(Section):
    """What every kind of model and of data has. The docstring below `kind` says in a line what it is."""

    kind: str
    missing: ClassVar[str] = ""
    """What brings the files of `path`, to be said where nothing sets it."""
    reads: ClassVar[tuple[str, ...]] = ()
    """The keys that `problem` looks at; where one of them is wrong in itself, it is not asked."""

    def problem(self) -> str | None:
        """What cannot go together in the section, and what to do; None: nothing."""
        return None


class Model(Kind):
    block_size: int
    """Each kind has it, with a default of its own."""

    def parameters(self, vocabulary: int) -> int:
        """About how many it has; 0 where only its own code knows."""
        return 0


class Data(Kind):
    workers: Annotated[int, NO_RESULT] = Field(default=0, ge=0, le=1024)
    """Loader processes for each training process. Never changes what is computed."""
    validation: ClassVar[str] = "give it a validation split"
    """What to do where there is nothing to evaluate on."""

    def places(self) -> dict[str, str]:
        """The files and folders that it reads, by key."""
        values = {f"data.{name}": getattr(self, name, None) for name in ("tokenizer", "path")}
        return {key: url for key, url in values.items() if isinstance(url, str)}

    def parts(self) -> "dict[str, Data]":
        """Data that it is made of, by key. In their own messages their keys begin with `data.`: see `of_part`."""
        return {}

    def extras(self) -> set[str]:
        """The extras of this package that it needs, besides the client of each URL's store."""
        return set()

    def encoders(self) -> tuple[str, ...]:
        """Installed packages that make its tokens: another version of them may give other ones."""
        return ()

    def vocabulary_size(self) -> int:
        """About how many different tokens there are."""
        return 50257


def of_part(key: str, part: Data, text: str) -> str:
    """A part's key, or what it says of its keys, as the config names them: `key.path` in place of `data.path`."""
    return re.sub(rf"(?<![\w./-])data\.(?=(?:{'|'.join(type(part).model_fields)})\b)", f"{key}.", text)
