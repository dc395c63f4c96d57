"""Texts to prepare, what does it, and what a folder then holds."""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mingpt.data import bpe
from mingpt.data.dataset import DataSet
from mingpt.prepare.documents import Options, is_validation
from mingpt.prepare.prepare import prepare
from mingpt.prepare.shardwriter import ShardWriter
from tests.kits import bpe_kit

WORDS = ["the", "king", "is", "dead", "long", "live", "woe", "größer", "漢字", "🙂", "1234", "\n", "  "]
VOCABULARY = bpe_kit.small()


def some_texts(count: int, seed: int = 1) -> list[str]:
    """So many texts, no two of them the same; the same ones for the same seed."""
    chooser = random.Random(seed)
    return [" ".join(chooser.choices(WORDS, k=chooser.randrange(1, 40))) + f" {i}" for i in range(count)]


def jsonl(texts: Sequence[str], field: str = "text") -> str:
    """The texts as JSON lines."""
    return "".join(json.dumps({field: t, "id": i}) + "\n" for i, t in enumerate(texts))


def write_jsonl(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    """Write the texts as JSON lines."""
    path.write_text(jsonl(texts, field))
    return path


def prepared(sources: Sequence[Path | str], out: Path | str, **options: object) -> DataSet:
    """Prepare a data set in this process. options: of `prepare` and its Options."""
    known = {k: options.pop(k) for k in ("separator", "field", "val_fraction") if k in options}
    return prepare([str(s) for s in sources], str(out), VOCABULARY, Options(**known), **options)  # type: ignore[arg-type]


def into(folder: Path, *more: str) -> list[str]:
    """The options that write folder/out, with one process unless `more` says otherwise."""
    tokenizer = str(bpe_kit.write_gpt2(folder / "gpt2"))
    return ["--out", str(folder / "out"), "--tokenizer", tokenizer, "--processes", "1", *more]


def expected(texts: Sequence[str], fraction: float, split: str) -> list[int]:
    """The tokens of a split: each of its texts, followed by the end of text."""
    chosen = [t for t in texts if is_validation(next(iter(bpe.pieces(t))), fraction) == (split == "validation")]
    return [i for t in chosen for i in (*VOCABULARY.encode(t), VOCABULARY.end_of_text)]


def row(out: Path, dataset: DataSet, split: str) -> list[int]:
    """A split's tokens, read as anybody would."""
    assert dataset.dtype == "uint16"
    return [int(t) for s in dataset.shards if s.split == split for t in np.fromfile(out / s.name, "<u2")]


def files(folder: Path) -> dict[str, bytes]:
    """The content of each file in a folder, by its name."""
    return {p.name: p.read_bytes() for p in folder.iterdir()}


class Killed(Exception):
    """Stands for SIGKILL."""


@contextmanager
def killed(method: str, calls: int = 0) -> Iterator[None]:
    """In place of SIGKILL: from this call on, the shard writer's method raises."""
    real, left = getattr(ShardWriter, method), iter(range(calls))

    def dying(self: ShardWriter, *given: object) -> object:
        if next(left, None) is None:
            raise Killed
        return real(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, method, dying)
        with pytest.raises(Killed):
            yield
