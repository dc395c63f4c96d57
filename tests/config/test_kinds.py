"""A kind of data or model is one module that registers itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import torch
from pydantic import Field

from config_kit import configured
from mingpt.config import compose
from mingpt.config.kinds import KINDS, Data, register
from mingpt.config.schema import Config
from mingpt.data.own import source_of
from mingpt.data.source import Source
from mingpt.data.vocabulary import Numbers, Vocabulary, vocabulary_of
from mingpt.errors import UserError
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime


class CountdownData(Data):
    kind: Literal["countdown"] = "countdown"
    """numbers that count down"""
    start: int = Field(default=9, ge=2)
    """Where they begin."""
    reads: ClassVar[tuple[str, ...]] = ("data.start", "model.block_size")

    def problem(self, config: Config) -> str | None:
        return "data.start is too small: raise it" if self.start <= config.model.block_size else None

    def open(self, block_size: int, micro_size: int, vocabulary: Vocabulary | None = None) -> Source:
        rows = torch.stack([torch.arange(self.start, self.start - block_size - 1, -1)] * 16)
        split = (rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        return source_of(split, split, micro_size, Numbers(self.start + 1))


@pytest.fixture
def countdown() -> Iterator[None]:
    register(CountdownData)
    yield
    KINDS["data"].pop("countdown", None)


def test_a_kind_that_nothing_else_names_is_there(countdown: None, capsys: pytest.CaptureFixture[str]) -> None:
    for chosen in ("data=countdown", "data.kind=countdown"):
        config = configured(chosen, "data.start=99")
        assert config.data == CountdownData(start=99)
        assert config.model_dump()["data"] == {"kind": "countdown", "workers": 0, "start": 99}
    assert compose.configure(["--help"]) is None
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"countdown numbers that count down", "data.start Where they begin. (9)"} <= {*lines}
    with pytest.raises(UserError) as mistake:
        configured("data=countdown", "data.start=1", "data.path=x")
    assert [text.split(":")[0] for text in mistake.value.problems] == [
        "data.start=1",
        "data.path is not a key of data.kind=countdown, only of text, chat, own, shards",
    ]
    with pytest.raises(UserError, match=r"^data\.start is too small: raise it$"):
        configured("data=countdown", "data.start=64")


def test_a_kind_that_nothing_else_names_is_trained_on(countdown: None, tmp_path: Path) -> None:
    arguments = (
        "data=countdown", "model.block_size=8", "model.n_layer=1", "model.n_embd=8", "train.max_steps=2",
        "train.eval_every=0", f"run.dir={tmp_path}/run", "snapshot.hot_every_steps=0", "world.device=cpu",
    )  # fmt: skip
    assert attempt([*arguments], Lifetime()) == 0
    manifest = read(Store(f"{tmp_path}/run/snapshots"), 2).manifest
    assert manifest.config["data"] == {"kind": "countdown", "workers": 0, "start": 9}
    assert vocabulary_of(manifest.vocabulary) == Numbers(10)
