"""mingpt.data.windows: what is trained on, and what is validated on. (test_text.py: that they never meet.)"""

from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mingpt.data.source import SampledSplit
from mingpt.data.windows import EvalChunks, PaddedBatches, TokenFile, WindowDataset, apart
from mingpt.model.language import IGNORE


def numbered(length: int) -> TokenFile:
    """A row in which the token at position i is i."""
    tokens = TokenFile(Path("no-such-file"))
    tokens._mapped = np.arange(length, dtype=np.uint16)
    return tokens


@given(st.integers(0, 60), st.integers(0, 20), st.integers(1, 12), st.integers(1, 15))
def test_windows_are_all_that_fit_and_no_more(length: int, start: int, block_size: int, stride: int) -> None:
    windows = WindowDataset(numbered(start + length + 10), start, start + length, block_size, stride)
    starts = [s for s in range(start, start + length, stride) if s + block_size < start + length]
    assert len(windows) == len(starts)
    ids = [*range(0, len(starts), 2), *range(1, len(starts), 2)]
    if ids:
        tokens, targets = windows[ids]
        assert tokens.tolist() == [[*range(starts[i], starts[i] + block_size)] for i in ids]
        assert torch.equal(targets, tokens + 1)
        assert (tokens.dtype, targets.dtype) == (torch.int64, torch.int64)


@given(st.integers(0, 80), st.integers(0, 20), st.integers(1, 9), st.integers(1, 8), st.integers(1, 50))
def test_every_target_counts_exactly_once_of_the_split_or_of_samples_spread_over_it(
    length: int, start: int, block_size: int, micro_size: int, most: int
) -> None:
    chunks = EvalChunks(numbered(start + length + 10), start, start + length, block_size)
    # All but the first token of the split, which nothing precedes
    whole = [[*range(start + 1, start + length)][i : i + block_size] for i in range(0, length - 1, block_size)]
    count = min(most, len(whole))
    some = [whole[i * len(whole) // count] for i in range(count)]
    padded, own = PaddedBatches(chunks, micro_size), SampledSplit(chunks, micro_size)
    for split, samples in ((padded, whole), (padded.evenly(most), some), (own.evenly(most), some)):
        counted: list[int] = []
        for i in range(len(split)):
            tokens, targets = split[i]
            rows = micro_size if isinstance(split, PaddedBatches) else min(micro_size, count - i * micro_size)
            assert tokens.shape == targets.shape == (rows, block_size)
            assert (tokens.dtype, targets.dtype) == (torch.int64, torch.int64)
            counts = targets != IGNORE
            assert counts.any()  # no microbatch for nothing
            assert torch.equal(tokens[counts] + 1, targets[counts])
            counted += targets[counts].tolist()
        assert counted == [target for sample in samples for target in sample]
        assert split.size == len(samples)


def test_a_document_begins_after_the_end_of_the_one_before() -> None:
    """data.documents=apart: a document sees itself alone (tests/model has what a model makes of the numbers)."""
    text, end = torch.tensor([[1, 2, 9, 4, 5, 9, 9, 6, 7]]), 9
    assert apart((text[:, :-1], text[:, 1:]), end)[3].tolist() == [[0, 0, 1, 1, 1, 2, 3, 3]]
