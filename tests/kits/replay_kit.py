"""Tiny runs that are trained in the test's own process, to be replayed there."""

import json
from pathlib import Path
from random import Random
from typing import Any

from mingpt.prepare.documents import Options
from mingpt.prepare.prepare import prepare
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from tests.kits import bpe_kit
from tests.kits.run_kit import TINY

WORDS = ("the", "king", "is", "dead", "long", "live", "queen", "and", "all")
SMALL = ("batch.global_size=8", "train.eval_every=0", "world.device=cpu", "snapshot.keep_best=false")


class Asked(Lifetime):
    """Somebody asks this process to stop in step `at`: training looks once a step."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.looks = at, 0
        super().__init__()

    @property
    def stop(self) -> bool:
        self.looks += 1
        return self.looks >= self.at > 0

    @stop.setter
    def stop(self, value: bool) -> None:
        pass


def settings_of(run_dir: str, *overrides: str) -> list[str]:
    """TINY's and SMALL's (of one's own model none of TINY's), then these. A later key of the same name wins.

    `~key` leaves out what is set here of this key and of those below it.
    """
    own = "".join(overrides[:1]).startswith("model._target_=")
    without = tuple(text[1:] for text in overrides if text[0] == "~")
    ours = [text for text in (*(() if own else TINY), *SMALL) if not text.startswith(without)]
    given = [*ours, f"run.dir={run_dir}", *(text for text in overrides if text[0] != "~")]
    return [*{text.partition("=")[0]: text for text in given}.values()]


def train_here(run_dir: str, *overrides: str) -> None:
    """Train in this process; fails the test unless it ends well."""
    assert attempt(settings_of(run_dir, *overrides), Lifetime()) == 0


def files_of(folder: Path) -> dict[str, Any]:
    """What is in a folder: the bytes of each file, and when it was written."""
    return {
        str(p.relative_to(folder)): (p.read_bytes() if p.is_file() else None, p.stat().st_mtime_ns)
        for p in sorted(folder.rglob("*"))
    }


RANDOM = ("data=random", "data.vocabulary=50", "data.samples=1000")


def data_of(kind: str, folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(a run's settings for data of this kind, and what must be said of the data's places when it is looked at)."""
    lines = [" ".join(Random(n).choices(WORDS, k=6)) for n in range(120)]
    folder.mkdir(parents=True, exist_ok=True)
    if kind in ("text", "bpe"):
        (folder / "t.txt").write_text("\n".join(lines))
        where = (f"data.path={folder}/t.txt",)
        if kind == "text":
            return (), where
        return ("data.tokens=bpe",), (*where, f"data.tokenizer={bpe_kit.write_gpt2(folder / 'gpt2')}")
    if kind in ("shards", "documents apart"):
        (folder / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        options = Options(val_fraction=0.1)
        prepare([f"{folder}/lines.jsonl"], f"{folder}/set", bpe_kit.small(), options, shard_tokens=301)
        apart = ("data.documents=apart",) if kind == "documents apart" else ()
        return ("data=shards", *apart), (f"data.path={folder}/set",)
    if kind == "chat":
        turns = "".join(json.dumps({"prompt": line[:8], "answer": line[8:16]}) + "\n" for line in lines)
        (folder / "chat.jsonl").write_text(turns)
        return ("data=chat", "data.tokens=byte", "model.block_size=96"), (f"data.path={folder}/chat.jsonl",)
    if kind == "mixture":
        parts = []
        for name in ("web", "code"):
            (folder / name).write_text("\n".join(lines[: 60 if name == "web" else 30]))
            weight = "0.7" if name == "web" else "[[0, 0.3], [4, 2]]"
            parts.append(f"{name}: {{path: {folder}/{name}, weight: {weight}, kind: text, tokens: byte}}")
        places = (f"data.mix.web.path={folder}/web", f"data.mix.code.path={folder}/code")
        return ("data=mix", f"data.mix={{{', '.join(parts)}}}"), places
    assert kind == "random"
    return RANDOM, ()
