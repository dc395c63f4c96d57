"""A kind of data or model is a class and a place in KINDS: groups, defaults, help and messages follow from these."""

from collections.abc import Iterator
from typing import ClassVar, Literal

import pytest
import torch
from pydantic import Field

from mingpt.compose import compose
from mingpt.config.datasets import MixData, TextComponent
from mingpt.config.keys import KINDS
from mingpt.config.kinds import Data, Model
from mingpt.config.models import Language
from mingpt.data.opening import open_data
from mingpt.errors import UserError
from mingpt.model.building import build_model
from mingpt.model.language import LanguageModel
from tests.kits.config_kit import configured


class CountdownData(Data):
    kind: Literal["countdown"] = "countdown"
    """numbers that count down"""
    start: int = Field(default=9, ge=2)
    """Where they begin."""
    stop: int = 0
    """Where they end."""
    reads: ClassVar[tuple[str, ...]] = ("data.start", "data.stop")

    def problem(self) -> str | None:
        return "data.start is too small: raise it" if self.start <= self.stop else None


@pytest.fixture
def countdown() -> Iterator[None]:
    KINDS["data"]["countdown"] = CountdownData
    yield
    del KINDS["data"]["countdown"]


def test_a_kind_that_nothing_else_names_is_there(countdown: None, capsys: pytest.CaptureFixture[str]) -> None:
    for chosen in ("data=countdown", "data.kind=countdown"):
        config = configured(chosen, "data.start=99")
        assert config.data == CountdownData(start=99)
        assert config.model_dump()["data"] == {"kind": "countdown", "workers": 0, "start": 99, "stop": 0}
    assert compose.printing(["--help"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"countdown numbers that count down", "data.start Where they begin. (9)"} <= {*lines}
    with pytest.raises(UserError) as mistake:
        configured("data=countdown", "data.start=1", "data.path=x")
    assert [text.split(":")[0] for text in mistake.value.problems] == [
        "data.start=1",
        "data.path is not a key of data.kind=countdown, only of text, chat, own, shards",
    ]
    with pytest.raises(UserError, match=r"^data\.start is too small: raise it$"):
        configured("data=countdown", "data.stop=64")


def test_each_kind_can_be_opened_or_built() -> None:
    assert len(KINDS["data"]) == 6
    for name, kind in KINDS["data"].items():
        assert issubclass(kind, Data)
        config = MixData(mix={"web": TextComponent()}) if name == "mix" else kind(kind=name)
        if name == "random":
            assert open_data(config, 8, 2).train[[0]][0].shape == (1, 8)
            continue
        with pytest.raises(UserError, match=r"^data\."):  # the reader's: no place, no target
            open_data(config, 8, 2)
    with torch.device("meta"):
        for name, kind in KINDS["model"].items():
            assert issubclass(kind, Model)
            section = kind.model_validate({"kind": name})
            if isinstance(section, Language):
                assert isinstance(build_model(section, 5), LanguageModel)
            else:
                with pytest.raises(UserError, match=r"^model\._target_="):
                    build_model(section, 5)
