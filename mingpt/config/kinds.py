"""Kinds of models and data: each is a section of its own class, in the module that builds or reads it.

To add one, write a module with a class that is registered, and name that module in MODULES. They lie in rooms
above this one, and are loaded by name: what is known of a kind here is what Model and Data declare.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import Field

from mingpt.config.section import NO_RESULT, Section

if TYPE_CHECKING:
    from torch import nn

    from mingpt.config.schema import Config
    from mingpt.data.source import Source
    from mingpt.data.vocabulary import Vocabulary

# Nothing else names them.
MODULES = {
    "mingpt.model": ("gpt2", "modern", "own"),
    "mingpt.data": ("chat", "mixture", "own", "shards", "synthetic", "text"),
}

CACHE_DIR = "~/.cache/mingpt"  # of this machine: what data, and torch's compiler, need not make again


class Kind(Section):
    """What every kind of model and of data has. The docstring below `kind` says in a line what it is."""

    kind: str
    missing: ClassVar[str] = ""
    """What brings the files of `path`, to be said where nothing sets it."""
    reads: ClassVar[tuple[str, ...]] = ()
    """The keys that `problem` looks at; where one of them is wrong in itself, it is not asked."""

    def problem(self, config: "Config") -> str | None:
        """What cannot go together in the config, and what to do; None: nothing."""
        return None


class Model(Kind):
    if TYPE_CHECKING:
        block_size: int  # each kind has it, with a default of its own

    def build(self, vocab_size: int) -> "nn.Module":
        """The module with its first weights. vocab_size: 0 if the data has no tokens."""
        raise NotImplementedError

    def parameters(self, vocabulary: int) -> int:
        """About how many it has; 0 where only its own code knows."""
        return 0

    def code(self) -> tuple[str | None, str | None]:
        """sha256 of the user's own code that it is written in, and of what that imports: other code, other bits."""
        return None, None


class Data(Kind):
    workers: Annotated[int, NO_RESULT] = Field(default=0, ge=0, le=1024)
    """Loader processes for each training process. Never changes what is computed."""
    validation: ClassVar[str] = "give it a validation split"
    """What to do where there is nothing to evaluate on."""

    def open(self, block_size: int, micro_size: int, vocabulary: "Vocabulary | None" = None) -> "Source":
        """The data in samples of block_size tokens; validation in microbatches of micro_size samples.

        vocabulary: that of a snapshot, to be used in place of one made from the data.
        Raises UserError, naming the key, if the data can't be read, or does not fit.
        """
        raise NotImplementedError

    def places(self) -> dict[str, str]:
        """The files and folders that it reads, by key."""
        given = {f"data.{name}": getattr(self, name, None) for name in ("tokenizer", "path")}
        return {key: url for key, url in given.items() if isinstance(url, str)}

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

    @classmethod
    def vocabularies(cls) -> "dict[str, Callable[[dict[str, Any]], Vocabulary]]":
        """Kinds of vocabularies that only this data has: from each one's JSON, which may be a stranger's, to itself."""
        return {}


def of_part(key: str, part: Data, text: str) -> str:
    """A part's key, or what it says of its keys, as the config names them: `key.path` in place of `data.path`."""
    return re.sub(rf"(?<![\w./-])data\.(?=(?:{'|'.join(type(part).model_fields)})\b)", f"{key}.", text)


FIRST = {"model": "gpt", "data": "text"}  # the kind of a section that names none


class Kinds(Mapping[str, dict[str, type[Kind]]]):
    """The kinds of each section, in the order of messages and --help.

    Their modules, and with them torch, are imported when a section is first looked at, and not for a verb's options.
    """

    def __init__(self) -> None:
        self.registered: dict[str, dict[str, type[Kind]]] = {section: {} for section in FIRST}

    def __getitem__(self, section: str) -> dict[str, type[Kind]]:
        _load()
        return self.registered[section]

    def __iter__(self) -> Iterator[str]:
        return iter(FIRST)

    def __len__(self) -> int:
        return len(FIRST)


KINDS = Kinds()
AnyKind = TypeVar("AnyKind", bound=Kind)


def register(kind: type[AnyKind]) -> type[AnyKind]:
    """Let configs have a kind of model or data: a decorator of its class."""
    section = "model" if issubclass(kind, Model) else "data"
    KINDS.registered[section][kind.model_fields["kind"].default] = kind
    return kind


@cache
def _load() -> None:
    for package, names in MODULES.items():
        for name in names:
            import_module(f"{package}.{name}")
    for section, first in FIRST.items():
        kinds = KINDS.registered[section]
        ordered = sorted(kinds.items(), key=lambda item: (item[0] != first, item[0]))
        kinds.clear()
        kinds.update(ordered)


def of_data() -> Iterator[type[Data]]:
    """The kinds of data that there are."""
    yield from (kind for kind in KINDS["data"].values() if issubclass(kind, Data))
