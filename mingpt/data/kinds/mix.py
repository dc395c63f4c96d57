"""Several data sets, mixed by weights."""

from bisect import bisect_right
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializeAsAny
from pydantic_core import PydanticCustomError

from mingpt.config.kinds import Data, of_part, register
from mingpt.config.section import LARGEST, NO_RESULT, Parts, follows
from mingpt.data.kinds.files import CachedData, RowData
from mingpt.data.kinds.shards import ShardsData
from mingpt.data.kinds.text import TextData

if TYPE_CHECKING:
    from mingpt.config.schema import Config
    from mingpt.data.source import Source
    from mingpt.data.vocabulary import Vocabulary


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
        from mingpt.compute.mixture import BLOCK

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

    def open(self, block_size: int, micro_size: int, vocabulary: "Vocabulary | None" = None) -> "Source":
        from mingpt.data.mixture import open_mix

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
