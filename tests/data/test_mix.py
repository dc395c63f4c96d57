"""`data=mix`: several data sets as one, and what is wrong with a mixture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mingpt.compose.stored import evaluation_config
from mingpt.compute.mixture import shares
from mingpt.config.affecting import settings
from mingpt.config.checks import missing_places
from mingpt.config.datasets import TextData
from mingpt.config.schema import Config
from mingpt.data.mixed import MixedSamples, MixedSplit
from mingpt.data.opening import open_data
from mingpt.data.source import Microbatch, Samples, Source
from mingpt.errors import TransientError, UserError
from mingpt.train.resume import changed
from tests.kits.config_kit import configured, problems
from tests.kits.told import Told

TWO = "data.mix={web: {path: WEB, kind: text, tokens: byte, weight: 7}, code: {path: CODE, kind: text, tokens: byte}}"


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Overrides for a mixture of two files in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("WEB").write_bytes(bytes(range(97, 122)) * 40)
    Path("CODE").write_bytes(bytes(range(65, 90)) * 20)
    return "data=mix", TWO, f"data.cache_dir={tmp_path}/cache", "model.block_size=8"


def opened(config: Config) -> Source:
    return open_data(config.data, config.model.block_size, 4)


# --- samples ---


def test_samples_and_validation_are_those_of_the_components(two: tuple[str, ...]) -> None:
    config = configured(*two, "data.mix.none={path: WEB, kind: text, tokens: byte, val_fraction: 0}")
    source = opened(config)
    assert source.mixture is not None
    assert source.mixture.sizes == (("code", 442), ("none", 992), ("web", 892))
    assert source.mixture.phases == ((0, shares([1, 1, 7])),)
    assert len(source.train) == 442 + 992 + 892
    tokens, targets = source.train[[442, 0, 2325, 441]]
    assert tokens[:, 0].tolist() == [97, 65, 97 + 891 % 25, 65 + 441 % 25]
    assert torch.equal(targets[:, :-1], tokens[:, 1:])
    assert isinstance(source.validation, MixedSplit)
    assert source.validation.parts == {"code": range(2), "web": range(2, 6)}
    alone = [open_data(part, 8, 4).validation for part in config.data.parts().values()]
    expected = [part[i][0].tolist() for part in alone for i in range(len(part))]
    assert [source.validation[i][0].tolist() for i in range(len(expected))] == expected


def test_the_datas_identity_follows_from_names_and_contents_whatever_their_order(two: tuple[str, ...]) -> None:
    sha256 = opened(configured(*two)).sha256
    turned = "data.mix={code: {path: CODE, kind: text, tokens: byte}, web: {path: ./WEB, kind: text, tokens: byte}}"
    assert opened(configured("data=mix", turned, *two[2:])).sha256 == sha256
    swapped = two[1].replace("WEB", "X").replace("CODE", "WEB").replace("X", "CODE")
    assert opened(configured("data=mix", swapped, *two[2:])).sha256 != sha256
    Path("CODE").write_bytes(b"other" * 200)
    assert opened(configured(*two)).sha256 != sha256


@pytest.mark.parametrize("kind", [UserError, TransientError])
def test_errors_while_training_name_the_components_keys(kind: type[Exception]) -> None:
    class Broken(Samples):
        def __len__(self) -> int:
            return 9

        def __getitem__(self, ids: Sequence[int]) -> Microbatch:
            raise kind("data.path=s3://b/data.path/x: gone; data.tokens and data.seed")

    samples = MixedSamples({"data.mix.web": (TextData(), Broken())})
    with pytest.raises(kind) as told:
        samples[[3]]
    assert str(told.value) == "data.mix.web.path=s3://b/data.path/x: gone; data.mix.web.tokens and data.seed"


# --- the config ---


@pytest.mark.parametrize(
    "more",
    [
        ("data.mix={web: {path: WEB, tokens: byte}, code: {pathh: CODE, kind: txt, weight: x, stride: 0}}",
         "data.mix.c={path: x, kind: text, tokens: bpe, workers: 3}", "data.mix.c.val_fraction=2"),
        ("data.mix.a={path: x}", "data.mix.b={path: x, documents: apart}"),  # a batch would have tensors of two forms
        ("data.mix.web.weight=0.0001",),
        ("data.mix.web.weight=[[0,1],[9,0]]", "data.mix.code.weight=[[0,1],[5,0]]"),
        ("~data.mix.web", "~data.mix.code"),
        ("data.mix.code.tokenizer=x",),
        ("data.mix.web=3",),
    ],
)  # fmt: skip
def test_what_cannot_be(two: tuple[str, ...], more: tuple[str, ...], told: Told) -> None:
    told(problems(*two, *more))


@pytest.mark.parametrize("weight", ["0", "true", "[]", "[1,2]", "[[1,1]]", "[[0,1],[0,2]]", "[[0,1],[5.5,2]]",
                                    "[[0,-1]]", "[[0,1,2]]", "1e300"])  # fmt: skip
def test_a_weight_is_a_number_above_0_or_pairs_from_step_0_on(two: tuple[str, ...], weight: str) -> None:
    (problem,) = problems(*two, f"data.mix.web.weight={weight}")
    assert problem.startswith("data.mix.web.weight=")


def test_components_that_cannot_be_opened_together_are_told_by_name_and_all_at_once(
    two: tuple[str, ...], told: Told
) -> None:
    with told.mistake():
        opened(configured(*two, "data.mix.web.tokens=char"))
    config = configured(*two, "data.mix.web.path=nowhere", "data.mix.code.path=neither")
    with pytest.raises(UserError) as missing:
        opened(config)
    told(missing.value.problems)
    assert missing_places(config, missing.value.problems) == []


# --- resume, and a stranger's snapshot ---


def test_what_affects_the_result_is_told_by_key(two: tuple[str, ...]) -> None:
    before = configured(*two).model_dump()
    changes = ("web.weight=[[0,7],[99,1]]", "web.path=./WEB", "new={path: CODE}")
    more = (f"data.mix.{change}" for change in changes)
    after = configured(*two, *more, "~data.mix.code", "data.cache_dir=elsewhere").model_dump()
    found = changed(before, after)
    assert found["data.mix.web.weight"] == [7, [[0, 7], [99, 1]]]
    assert found["data.mix.code.tokens"] == ["byte", None]
    assert found["data.mix.new.weight"] == [None, 1.0]
    assert not [key for key in found if key.endswith(("path", "cache_dir", "web.kind"))]
    older: dict[str, Any] = {**before, "data": {**before["data"], "mix": {"web": {"kind": "text", "path": "x"}}}}
    assert settings(older)[0]["data.mix.web.stride"] == 1  # of a version that did not have the key


def test_a_snapshots_mixture_is_taken_but_not_what_is_this_machines_own(two: tuple[str, ...]) -> None:
    stored = configured(*two, "data.mix.code.stride=3").model_dump()
    stored["data"]["mix"]["web"]["cache_dir"] = "/from/a/stranger"
    data = evaluation_config(stored, "run", ["data.mix.code.path=OTHER", "data.cache_dir=here"], 1).model_dump()["data"]
    assert {part["cache_dir"] for part in data["mix"].values()} == {"here"}
    assert data["mix"]["code"]["path"] == "OTHER"
    assert (data["mix"]["code"]["stride"], data["mix"]["web"]["weight"]) == (3, 7)
    stored["data"]["mix"]["web"]["path"] = "/etc/passwd"
    with pytest.raises(UserError, match=r"^data\.mix\.web\.path "):
        evaluation_config(stored, "run", [], 1)
