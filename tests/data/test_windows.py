"""mingpt.data.windows: what is trained on, and what is validated on. (test_text.py: that they never meet.)"""

from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mingpt.data.windows import EvalChunks, TokenFile, WindowDataset
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
    pieces = EvalChunks(numbered(start + length + 10), start, start + length, block_size, micro_size)
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
    assert pieces.targets == len(counted)
