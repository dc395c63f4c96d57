"""Several data sets as one: their samples numbered one after the other, their validation splits evaluated apart."""

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AfterValidator, Field, SerializeAsAny
from pydantic_core import PydanticCustomError

from mingpt.compute.mixture import BLOCK, Mixture, shares
from mingpt.config.kinds import Data, of_part, register
from mingpt.config.section import LARGEST, NO_RESULT, Parts, follows
from mingpt.data.cache import CachedData, RowData
from mingpt.data.shards import ShardsData
from mingpt.data.source import EvalSplit, Microbatch, SampledSplit, Samples, Source, sampled_split
from mingpt.data.text import TextData
from mingpt.data.vocabulary import Vocabulary
from mingpt.errors import TransientError, UserError

if TYPE_CHECKING:
    from mingpt.config.schema import Config


MOST_PAIRS = 1000


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= LARGEST


def _weight(value: Any) -> Any:
    """A number above 0; or pairs [first step, weight], not all of them 0."""
    pairs = value if isinstance(value, list) else [[0, value]]
    good = all(isinstance(pair, list) and len(pair) == 2 and all(map(_number, pair)) for pair in pairs)
    steps = [pair[0] for pair in pairs] if good else []
    if len(steps) > MOST_PAIRS:
        raise PydanticCustomError("weight", f"must be at most {MOST_PAIRS} pairs")
    if not (
        steps[:1] == [0]
        and all(type(step) is int for step in steps)
        and steps == sorted({*steps})
        and any(weight > 0 for _, weight in pairs)
    ):
        raise PydanticCustomError(
            "weight", "must be a number above 0, or pairs [step, weight] from step 0 on, as [[0, 0.7], [1000, 0.3]]"
        )
    return value


class Component(RowData):
    weight: Annotated[Any, AfterValidator(_weight)] = 1.0
    """Its share, against those of the others: a number, or pairs [step, weight] from which step on it is which."""
    cache_dir: Annotated[str, NO_RESULT] = follows("${data.cache_dir}", min_length=1)
    """As for the whole."""
    cache_timeout_seconds: Annotated[float, NO_RESULT] = follows("${data.cache_timeout_seconds}", gt=0)
    """As for the whole."""

    def at(self, step: int) -> float:
        """The weight at a step."""
        pairs = self.weight if isinstance(self.weight, list) else [[0, self.weight]]
        return float(pairs[bisect_right(pairs, step, key=itemgetter(0)) - 1][1])

    def problem(self, config: "Config") -> str | None:
        if self.workers:
            return f"data.workers={self.workers}: the loader processes are those of the whole mixture: leave it out"
        return super().problem(config)


class ShardsComponent(Component, ShardsData):
    kind: Literal["shards"] = "shards"


class TextComponent(Component, TextData):
    kind: Literal["text"] = "text"


@register
class MixData(CachedData):
    kind: Literal["mix"] = "mix"
    """several data sets of kind shards or text, mixed by weights that may change by step"""
    mix: Annotated[dict[str, SerializeAsAny[Component]], Parts((ShardsComponent, TextComponent))] = Field(default={})
    """By name, each with the keys of its kind (shards or text) and weight: 0.7, or by step [[0, 0.7], [1000, 0.3]]."""

    validation = "give its components a validation split"

    def problem(self, config: "Config") -> str | None:
        if not self.mix:
            return (
                "data.mix has no components: set data.mix={web: {path: …, weight: 0.7}, code: {path: …, weight: 0.3}}"
            )
        if odd := [name for name in self.mix if not name.replace("-", "").replace("_", "").isalnum()]:
            return f"data.mix: {odd[0]!r} is not a name of letters, digits, '-' and '_': take another"
        apart = [key for key, part in self.parts().items() if getattr(part, "documents", "joined") == "apart"]
        if joined := apart and [key for key in self.parts() if key not in apart]:
            return (
                f"{' and '.join(f'{key}.documents=apart' for key in apart)}, but those of {' and '.join(joined)} are "
                f"joined: set all to one (kind=text has no documents: `mingpt prepare` makes shards of a text)"
            )
        for step, weights in self.phases():
            whole = sum(weights.values())
            if whole == 0:
                return f"data.mix: from step {step} on all weights are 0: raise one of them"
            if few := [f"data.mix.{name}.weight" for name, w in weights.items() if 0 < w < whole / BLOCK]:
                return (
                    f"{' and '.join(few)}: from step {step} on less than one in {BLOCK} samples, which is too few for "
                    f"exact shares: raise it, or set it to 0"
                )
        return None

    def phases(self) -> list[tuple[int, dict[str, float]]]:
        """(first step, weights by name) from 0 on; the names in order."""
        lists = [c.weight for c in self.mix.values() if isinstance(c.weight, list)]
        steps = sorted({0, *(int(first) for pairs in lists for first, _ in pairs)})
        return [(step, {name: part.at(step) for name, part in sorted(self.mix.items())}) for step in steps]

    def open(self, block_size: int, micro_size: int, vocabulary: Vocabulary | None = None) -> Source:
        return open_mix(self, block_size, micro_size, vocabulary)

    def parts(self) -> dict[str, Data]:
        return {f"data.mix.{name}": part for name, part in sorted(self.mix.items())}

    def places(self) -> dict[str, str]:
        return {
            of_part(key, part, k): place for key, part in self.parts().items() for k, place in part.places().items()
        }

    def extras(self) -> set[str]:
        return {extra for part in self.mix.values() for extra in part.extras()}

    def encoders(self) -> tuple[str, ...]:
        return tuple(sorted({package for part in self.mix.values() for package in part.encoders()}))

    def vocabulary_size(self) -> int:
        return max((part.vocabulary_size() for part in self.mix.values()), default=super().vocabulary_size())


@contextmanager
def named(key: str, part: Data) -> Iterator[None]:
    """Errors of a component's reader name its keys as they are in the config."""
    try:
        yield
    except UserError as error:
        raise UserError(*(of_part(key, part, problem) for problem in error.problems)) from error
    except TransientError as error:
        raise TransientError(of_part(key, part, str(error))) from error


class MixedSamples(Samples):
    """A sample's number is that in its component, plus the numbers of samples in the components before it."""

    def __init__(self, parts: Mapping[str, tuple[Data, Samples]]) -> None:
        self.parts = [(key, part, samples) for key, (part, samples) in parts.items()]
        self.stops = [*accumulate(len(samples) for _, samples in parts.values())]

    def __len__(self) -> int:
        return self.stops[-1]

    def __getitem__(self, ids: Sequence[int]) -> Microbatch:
        wanted = np.array(ids, dtype=np.int64)
        which = np.searchsorted(self.stops, wanted, side="right")
        order, found = np.argsort(which, kind="stable"), list[Microbatch]()
        for i in np.unique(which).tolist():
            key, part, samples = self.parts[i]
            with named(key, part):
                found.append(samples[(wanted[which == i] - self.stops[i] + len(samples)).tolist()])
        back = torch.from_numpy(np.argsort(order))
        return tuple(torch.cat(tensors)[back] for tensors in zip(*found, strict=True))


class MixedSplit(SampledSplit):
    """The components' validation splits, one after the other. parts: which microbatches are whose."""

    def __init__(self, splits: Mapping[str, tuple[Data, EvalSplit]]) -> None:
        self.splits = [(key, part, sampled_split(split)) for key, (part, split) in splits.items()]
        self.size = sum(split.size for *_, split in self.splits)
        self.micro_size = max(split.micro_size for *_, split in self.splits)
        stops = [*accumulate(len(split) for _, _, split in self.splits)]
        spans = (
            (key, range(stop - len(split), stop)) for (key, _, split), stop in zip(self.splits, stops, strict=True)
        )
        self.parts = {key.rpartition(".")[2]: span for key, span in spans if span}
        self.stops = stops

    def __len__(self) -> int:
        return self.stops[-1]

    def evenly(self, most: int) -> "MixedSplit":
        """Of each component a share by its size, at least one sample."""
        shares = {key: (part, split.evenly(-(-split.size * most // self.size))) for key, part, split in self.splits}
        return MixedSplit(shares)

    def __getitem__(self, index: int, /) -> Microbatch:
        i = int(np.searchsorted(self.stops, index, side="right"))
        key, part, split = self.splits[i]
        with named(key, part):
            return split[index - self.stops[i] + len(split)]


def open_mix(config: MixData, block_size: int, micro_size: int, vocabulary: Vocabulary | None = None) -> Source:
    """Raises UserError, which lists the problems of all components, or names two with different vocabularies."""
    found, problems, parts = dict[str, Source](), list[str](), config.parts()
    for key, part in parts.items():
        try:
            with named(key, part):
                found[key] = part.open(block_size, micro_size, vocabulary)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    (first, source), *others = found.items()
    for key, other in others:
        if other.vocabulary.to_json() != source.vocabulary.to_json():
            raise UserError(
                f"{first} and {key} have different vocabularies ({_about(source)} and {_about(other)}): make the "
                f"tokens of both with one tokenizer, or use bytes; nanoGPT's files need {first}.tokenizer and "
                f"{key}.tokenizer"
            )
    phases = tuple((step, shares([*weights.values()])) for step, weights in config.phases())
    names = {key: key.rpartition(".")[2] for key in found}
    content = [[names[key], each.sha256] for key, each in found.items()]
    return Source(
        MixedSamples({key: (parts[key], each.train) for key, each in found.items()}),
        MixedSplit({key: (parts[key], each.validation) for key, each in found.items()}),
        source.vocabulary,
        sha256(json.dumps(content).encode()).hexdigest(),
        mixture=Mixture(tuple((names[key], len(each.train)) for key, each in found.items()), phases),
    )


def _about(source: Source) -> str:
    return f"{source.vocabulary.to_json()['kind']}, {source.vocabulary.size} tokens"
