"""The samples of several data sets as one: numbered one after the other, their validation splits evaluated apart."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from mingpt.config.kinds import Data, of_part
from mingpt.data.source import EvalSplit, Microbatch, SampledSplit, Samples, sampled_split
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
        """A smaller split: each component has a share of it by its size, at least one sample."""
        smaller = dict[str, tuple[Data, EvalSplit]]()
        for key, part, split in self.splits:
            smaller[key] = part, split.evenly(-(-split.size * most // self.size))
        return MixedSplit(smaller)

    def __getitem__(self, index: int, /) -> Microbatch:
        i = int(np.searchsorted(self.stops, index, side="right"))
        key, part, split = self.splits[i]
        with named(key, part):
            return split[index - self.stops[i] + len(split)]
