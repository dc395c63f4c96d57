"""Several data sets as one: their samples numbered one after the other, their validation splits evaluated apart."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256

import numpy as np
import torch

from mingpt.compute.mixture import Mixture, shares
from mingpt.config.datasets import MixData, ShardsData, TextData
from mingpt.config.kinds import Data, of_part
from mingpt.data.shards import open_shards
from mingpt.data.source import EvalSplit, Microbatch, SampledSplit, Samples, Source, sampled_split
from mingpt.data.text import open_text
from mingpt.data.vocabulary import Vocabulary
from mingpt.errors import TransientError, UserError


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
        self.parts, self.stops = list[tuple[str, Data, Samples]](), list[int]()
        stop = 0
        for key, (part, samples) in parts.items():
            stop += len(samples)
            self.parts.append((key, part, samples))
            self.stops.append(stop)

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
        self.splits, self.stops = list[tuple[str, Data, SampledSplit]](), list[int]()
        self.parts = dict[str, range]()
        self.size = self.micro_size = 0
        start = 0
        for key, (part, given) in splits.items():
            split = sampled_split(given)
            span = range(start, start + len(split))
            if span:
                self.parts[key.rpartition(".")[2]] = span
            self.splits.append((key, part, split))
            self.stops.append(span.stop)
            self.size += split.size
            self.micro_size = max(self.micro_size, split.micro_size)
            start = span.stop

    def __len__(self) -> int:
        return self.stops[-1]

    def evenly(self, most: int) -> "MixedSplit":
        """Of each component a share by its size, at least one sample."""
        smaller = dict[str, tuple[Data, EvalSplit]]()
        for key, part, split in self.splits:
            smaller[key] = part, split.evenly(-(-split.size * most // self.size))
        return MixedSplit(smaller)

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
                found[key] = _opened(part, block_size, micro_size, vocabulary)
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
    train, validation = dict[str, tuple[Data, Samples]](), dict[str, tuple[Data, EvalSplit]]()
    content, sizes = list[list[str]](), list[tuple[str, int]]()
    for key, each in found.items():
        name = key.rpartition(".")[2]
        train[key] = parts[key], each.train
        validation[key] = parts[key], each.validation
        content.append([name, each.sha256])
        sizes.append((name, len(each.train)))
    phases = [(step, shares([*weights.values()])) for step, weights in config.phases()]
    return Source(
        MixedSamples(train),
        MixedSplit(validation),
        source.vocabulary,
        sha256(json.dumps(content).encode()).hexdigest(),
        mixture=Mixture(tuple(sizes), tuple(phases)),
    )


def _opened(part: Data, block_size: int, micro_size: int, vocabulary: Vocabulary | None) -> Source:
    if isinstance(part, TextData):
        return open_text(part, block_size, micro_size, vocabulary)
    assert isinstance(part, ShardsData)
    return open_shards(part, block_size, micro_size, vocabulary)


def _about(source: Source) -> str:
    return f"{source.vocabulary.to_json()['kind']}, {source.vocabulary.size} tokens"
