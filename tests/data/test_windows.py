"""mingpt.data.windows: what is trained on, what is validated on, and that they never meet."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mingpt.data.text import TextData
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


@pytest.mark.parametrize(("val_fraction", "border"), [(0.0, 103), (0.5, 52)])
def test_no_training_sample_touches_a_validation_token(tmp_path: Path, val_fraction: float, border: int) -> None:
    path = tmp_path / "source.txt"
    path.write_text("".join(chr(0x4E00 + i) for i in range(103)), encoding="utf-8")  # the token i is at i
    text = TextData(path=str(path), cache_dir=f"{tmp_path}/cache", val_fraction=val_fraction).open(7, 8)
    tokens, targets = text.train[range(len(text.train))]
    assert {*tokens.flatten().tolist(), *targets.flatten().tolist()} == set(range(border))
    split = text.validation
    validated = [t for i in range(len(split)) for t in split[i][1].flatten().tolist() if t != IGNORE]
    assert validated == list(range(border + 1, 103))
