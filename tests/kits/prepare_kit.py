"""Texts to prepare, and what a folder then holds."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

WORDS = ["the", "king", "is", "dead", "long", "live", "woe", "größer", "漢字", "🙂", "1234", "\n", "  "]


class Killed(Exception):
    """In place of SIGKILL."""


def some_texts(count: int, seed: int = 1) -> list[str]:
    chooser = random.Random(seed)
    return [" ".join(chooser.choices(WORDS, k=chooser.randrange(1, 40))) + f" {i}" for i in range(count)]


def jsonl(texts: Sequence[str], field: str = "text") -> str:
    return "".join(json.dumps({field: t, "id": i}) + "\n" for i, t in enumerate(texts))


def write_jsonl(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    path.write_text(jsonl(texts, field))
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}
