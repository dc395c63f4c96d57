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


@given(st.integers(0, 80), st.integers(0, 20), st.integers(1, 9), st.integers(1, 5))
def test_every_target_of_the_split_counts_exactly_once(
    length: int, start: int, block_size: int, micro_size: int
) -> None:
    chunks = EvalChunks(numbered(start + length + 10), start, start + length, block_size)
    pieces = PaddedBatches(chunks, micro_size)
    counted: list[int] = []
    for i in range(len(pieces)):
        tokens, targets = pieces[i]
        assert tokens.shape == targets.shape == (micro_size, block_size)
        assert (tokens.dtype, targets.dtype) == (torch.int64, torch.int64)
        counts = targets != IGNORE
        assert counts.any()  # no microbatch for nothing
        assert torch.equal(tokens[counts] + 1, targets[counts])
        counted += targets[counts].tolist()
    # All but the first token of the split, which nothing precedes
    assert counted == list(range(start + 1, start + length))
    assert pieces.size == len(chunks) == -(-len(counted) // block_size)


@given(st.integers(0, 400), st.integers(1, 50), st.integers(1, 9))
def test_some_of_a_split_are_the_same_samples_spread_over_it_whatever_the_microbatches(
    length: int, most: int, block_size: int
) -> None:
    """The last microbatch is filled up; that of a split of one's own may be shorter."""
    chunks, found = EvalChunks(numbered(length), 0, length, block_size), []
    for micro_size in (1, 3, 8):
        part = PaddedBatches(chunks, micro_size).evenly(most)
        microbatches = [part[i] for i in range(len(part))]
        assert {targets.shape for _, targets in microbatches} <= {(micro_size, block_size)}
        assert part.size == min(most, len(chunks))
        own = SampledSplit(chunks, micro_size).evenly(most)
        for batches in (microbatches, [own[i] for i in range(len(own))]):
            targets = [target for _, each in batches for target in each.flatten().tolist() if target != IGNORE]
            found.append(targets)
    assert all(targets == found[0] for targets in found)
    taken = sorted({(target - 1) // block_size for target in found[0]})
    assert taken == [i * len(chunks) // len(taken) for i in range(len(taken))]


def test_a_document_begins_after_the_end_of_the_one_before() -> None:
    """data.documents=apart: a document sees itself alone (tests/model has what a model makes of the numbers)."""
    text, end = torch.tensor([[1, 2, 9, 4, 5, 9, 9, 6, 7]]), 9
    assert apart((text[:, :-1], text[:, 1:]), end)[3].tolist() == [[0, 0, 1, 1, 1, 2, 3, 3]]
