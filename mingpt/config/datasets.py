"""The kinds of data: each one's section of the config. `data/opening.py` opens them."""

from bisect import bisect_right
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, SerializeAsAny
from pydantic_core import PydanticCustomError

from mingpt.config.kinds import CACHE_DIR, Data, of_part
from mingpt.config.section import LARGEST, MISSING, NO_RESULT, AffectsResult, Own, Parts, follows


class CachedData(Data):
    """Data from files, of which each node keeps a tokenized or downloaded copy."""

    cache_dir: Annotated[str, NO_RESULT] = Field(default=CACHE_DIR, min_length=1)
    """A local folder for tokenized or downloaded data, shared by the processes of a node."""
    cache_timeout_seconds: Annotated[float, NO_RESULT] = Field(default=600, gt=0)
    """Longest wait for another process of the node that is tokenizing or downloading, without progress of that."""


class RowData(CachedData):
    """Data that is one long row of tokens, out of which samples are cut."""

    stride: int = Field(default=1, ge=1)
    """Tokens between the starts of two samples. 1: every position; block_size: each token once an epoch."""


class Tokenized(CachedData):
    """One file, tokenized at the start."""

    path: Annotated[str, NO_RESULT] = Field(default=MISSING, min_length=1)
    """The file: any fsspec URL (a local path, s3://…, gs://…, https://…)."""
    tokens: Literal["char", "byte", "bpe"] = "char"
    """What a token is: a character, a byte (256 of them), or a piece of a word (data.tokenizer)."""
    tokenizer: Annotated[str | None, NO_RESULT] = Field(default=None, min_length=1)
    """The vocabulary of bpe: a tokenizer.json, or a folder with one or GPT-2's files; any URL; the hub's OWNER/NAME."""
    val_fraction: float = Field(default=0.1, ge=0, lt=1)
    """The share at the end of the file that is kept for validation."""

    reads: ClassVar[tuple[str, ...]] = ("data.tokens", "data.tokenizer")
    validation = "raise data.val_fraction"

    def problem(self) -> str | None:
        if self.tokens == "bpe" and self.tokenizer is None:
            return (
                "data.tokens=bpe needs a vocabulary: set data.tokenizer=…, for instance to data/gpt2, which "
                "`mingpt fetch gpt2-vocabulary` writes"
            )
        if self.tokens != "bpe" and self.tokenizer is not None:
            return (
                f"data.tokenizer={self.tokenizer}, but data.tokens={self.tokens}: set data.tokens=bpe, or leave it out"
            )
        return None

    def extras(self) -> set[str]:
        return {"bpe"} if self.tokens == "bpe" else set()

    def encoders(self) -> tuple[str, ...]:
        return ("tokenizers",) if self.tokens == "bpe" else ()

    def vocabulary_size(self) -> int:
        return {"char": 100, "byte": 256, "bpe": 50257}[self.tokens]


class TextData(Tokenized, RowData):
    kind: Literal["text"] = "text"
    """one text, tokenized at the start"""


PLAIN, CHATML = "plain", "chatml"
FORMS = (PLAIN, CHATML)
TEMPLATE = "data.template"


class ChatData(Tokenized):
    kind: Literal["chat"] = "chat"
    """conversations, with loss on the answers alone"""
    # The default is that of runs of before; data=chat sets chatml. The content of other templates is in the vocabulary.
    template: Annotated[
        Literal["plain", "chatml"] | Annotated[str, Field(min_length=1)],
        AffectsResult(lambda data: data.get("template") in FORMS),
    ] = "plain"
    """chatml, or plain (User: and Assistant:); or whose chat_template: a tokenizer's folder, a file, OWNER/NAME."""

    reads = (*Tokenized.reads, TEMPLATE)

    def problem(self) -> str | None:
        if self.template not in FORMS and self.tokens != "bpe":
            return (
                f"{TEMPLATE}={self.template}: neither chatml nor plain, and a tokenizer's needs data.tokens=bpe and "
                f"data.tokenizer=…"
            )
        return super().problem()

    def places(self) -> dict[str, str]:
        return super().places() | ({} if self.template in FORMS else {TEMPLATE: self.template})

    def encoders(self) -> tuple[str, ...]:
        return super().encoders() + (() if self.template == PLAIN else ("jinja2",))


class ShardsData(RowData):
    kind: Literal["shards"] = "shards"
    """any amount of text, tokenized before"""
    path: Annotated[str, NO_RESULT] = Field(default=MISSING, min_length=1)
    """The folder that `mingpt prepare` has written, or one with nanoGPT's train.bin and val.bin: any fsspec URL."""
    tokenizer: Annotated[str | None, NO_RESULT] = Field(default=None, min_length=1)
    """The vocabulary of nanoGPT's files, which name none, as for text; null: numbers, which spell no text."""
    documents: Literal["joined", "apart"] = "joined"
    """apart: a token sees nothing of the documents before its own, and positions count from its document's start."""
    cache_bytes: Annotated[int, NO_RESULT] = Field(default=2**35, ge=1)
    """Most bytes of shards that a node keeps in cache_dir, when data.path is no local folder."""

    validation = "prepare them with a larger --val-fraction"
    missing = (
        "set it to shards: `mingpt fetch fineweb-edu --tokens 10B` writes data/fineweb-edu, `mingpt fetch tinystories` "
        "data/tinystories, a small one to try things out; `mingpt prepare 'hf://datasets/OWNER/NAME/*.parquet' "
        "--out data/mine --tokenizer data/gpt2` makes them of any dataset or files"
    )

    def extras(self) -> set[str]:
        return {"bpe"}  # their vocabulary: to train needs no package, to write a text does


# In a mixture, a share is exact to one sample in so many positions. Another number gives other bits.
MIX_BLOCK = 4096
MOST_PAIRS = 1000


def _is_pair(pair: object) -> bool:
    """Whether it is [step, weight], both numbers from 0 on. To Python, true and false are numbers, too."""
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    for number in pair:
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= LARGEST:
            return False
    return True


def _weight(value: Any) -> Any:
    """A number above 0; or pairs [first step, weight], not all of them 0."""
    pairs = value if isinstance(value, list) else [[0, value]]
    if all(map(_is_pair, pairs)):
        if len(pairs) > MOST_PAIRS:
            raise PydanticCustomError("weight", f"must be at most {MOST_PAIRS} pairs")
        steps = [step for step, _ in pairs]
        whole = all(type(step) is int for step in steps)
        if steps[:1] == [0] and whole and steps == sorted({*steps}) and any(weight > 0 for _, weight in pairs):
            return value
    raise PydanticCustomError(
        "weight", "must be a number above 0, or pairs [step, weight] from step 0 on, as [[0, 0.7], [1000, 0.3]]"
    )


class Component(RowData):
    weight: Annotated[Any, AfterValidator(_weight)] = 1.0
    """Its share, against those of the others: a number, or pairs [step, weight] from which step on it is which."""
    cache_dir: Annotated[str, NO_RESULT] = follows("${data.cache_dir}", min_length=1)
    """Where this component's tokens are cached: data.cache_dir, unless set."""
    cache_timeout_seconds: Annotated[float, NO_RESULT] = follows("${data.cache_timeout_seconds}", gt=0)
    """Seconds that a process waits for another one to fill the cache: data.cache_timeout_seconds, unless set."""

    def at(self, step: int) -> float:
        """The weight at a step."""
        pairs = self.weight if isinstance(self.weight, list) else [[0, self.weight]]
        return float(pairs[bisect_right(pairs, step, key=itemgetter(0)) - 1][1])

    def problem(self) -> str | None:
        if self.workers:
            return f"data.workers={self.workers}: the loader processes are those of the whole mixture: leave it out"
        return super().problem()


class ShardsComponent(Component, ShardsData):
    kind: Literal["shards"] = "shards"


class TextComponent(Component, TextData):
    kind: Literal["text"] = "text"


class MixData(CachedData):
    kind: Literal["mix"] = "mix"
    """several data sets of kind shards or text, mixed by weights that may change by step"""
    mix: Annotated[dict[str, SerializeAsAny[Component]], Parts((ShardsComponent, TextComponent))] = Field(default={})
    """By name, each with the keys of its kind (shards or text) and weight: 0.7, or by step [[0, 0.7], [1000, 0.3]]."""

    validation = "give its components a validation split"

    def problem(self) -> str | None:
        if not self.mix:
            return (
                "data.mix has no components: set data.mix={web: {path: …, weight: 0.7}, code: {path: …, weight: 0.3}}"
            )
        for name in self.mix:
            if not name.replace("-", "").replace("_", "").isalnum():
                return f"data.mix: {name!r} is not a name of letters, digits, '-' and '_': take another"
        return self._odd_documents() or self._odd_weights()

    def _odd_documents(self) -> str | None:
        """A batch has one form: with the number of each token's document, or without."""
        apart, joined = list[str](), list[str]()
        for key, part in self.parts().items():
            (apart if getattr(part, "documents", "joined") == "apart" else joined).append(key)
        if not apart or not joined:
            return None
        return (
            f"{' and '.join(f'{key}.documents=apart' for key in apart)}, but those of {' and '.join(joined)} are "
            f"joined: set all to one (kind=text has no documents: `mingpt prepare` makes shards of a text)"
        )

    def _odd_weights(self) -> str | None:
        for step, weights in self.phases():
            whole = sum(weights.values())
            if whole == 0:
                return f"data.mix: from step {step} on all weights are 0: raise one of them"
            few = [f"data.mix.{name}.weight" for name, weight in weights.items() if 0 < weight < whole / MIX_BLOCK]
            if few:
                return (
                    f"{' and '.join(few)}: from step {step} on less than one in {MIX_BLOCK} samples, which is too few "
                    f"for exact shares: raise it, or set it to 0"
                )
        return None

    def phases(self) -> list[tuple[int, dict[str, float]]]:
        """(first step, weights by name) from 0 on; the names in order."""
        steps = {0}
        for part in self.mix.values():
            if isinstance(part.weight, list):
                steps.update(int(first) for first, _ in part.weight)
        ordered = sorted(self.mix.items())
        return [(step, {name: part.at(step) for name, part in ordered}) for step in sorted(steps)]

    def parts(self) -> dict[str, Data]:
        return {f"data.mix.{name}": part for name, part in sorted(self.mix.items())}

    def places(self) -> dict[str, str]:
        found = dict[str, str]()
        for key, part in self.parts().items():
            for name, place in part.places().items():
                found[of_part(key, part, name)] = place
        return found

    def extras(self) -> set[str]:
        return set[str]().union(*(part.extras() for part in self.mix.values()))

    def encoders(self) -> tuple[str, ...]:
        return tuple(sorted(set[str]().union(*(part.encoders() for part in self.mix.values()))))

    def vocabulary_size(self) -> int:
        return max((part.vocabulary_size() for part in self.mix.values()), default=super().vocabulary_size())


class RandomData(Data):
    kind: Literal["random"] = "random"
    """random tokens without a file, to measure speed with"""
    vocabulary: int = Field(default=50257, ge=2, le=2**24)
    """How many different tokens there are."""
    samples: int = Field(default=1_000_000, ge=1)
    """How many samples, of model.block_size tokens each."""

    def vocabulary_size(self) -> int:
        return self.vocabulary


class OwnData(Data, Own):
    kind: Literal["own"] = "own"
    """data of one's own; its other keys are its arguments"""
    target: str = Field(default="", alias="_target_")
    """A function, package.module.name, that gives the mingpt.data.source.Source."""
    path: Annotated[str | None, NO_RESULT] = None
    """Where its files are, if it has an argument of this name. What is in them counts, not where they lie."""

    @property
    def arguments(self) -> dict[str, Any]:
        return super().arguments | ({} if self.path is None else {"path": self.path})
