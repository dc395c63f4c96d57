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


# --- windows ---


def test_a_window_is_a_block_and_its_targets_are_one_later() -> None:
    windows = WindowDataset(numbered(20), 5, 15, 4, 1)
    tokens, targets = windows[[0, 5, 2]]
    assert tokens.tolist() == [[5, 6, 7, 8], [10, 11, 12, 13], [7, 8, 9, 10]]
    assert targets.tolist() == [[6, 7, 8, 9], [11, 12, 13, 14], [8, 9, 10, 11]]
    assert (tokens.dtype, targets.dtype) == (torch.int64, torch.int64)


@given(st.integers(0, 60), st.integers(0, 20), st.integers(1, 12), st.integers(1, 15))
def test_windows_are_all_that_fit_and_no_more(length: int, start: int, block_size: int, stride: int) -> None:
    windows = WindowDataset(numbered(start + length + 10), start, start + length, block_size, stride)
    starts = [s for s in range(start, start + length, stride) if s + block_size < start + length]
    assert len(windows) == len(starts)
    if starts:
        tokens, targets = windows[range(len(windows))]
        assert tokens[:, 0].tolist() == starts
        assert int(targets.max()) < start + length


# --- EvalChunks ---


def test_pieces_are_consecutive_and_the_last_is_filled_with_ignored_targets() -> None:
    pieces = EvalChunks(numbered(30), 3, 24, 4, 2)
    assert (len(pieces), pieces.targets) == (3, 20)
    tokens, targets = (torch.cat([pieces[i][k] for i in range(3)]) for k in (0, 1))
    assert tokens.flatten().tolist() == [*range(3, 23), 0, 0, 0, 0]
    assert targets.flatten().tolist() == [*range(4, 24), *[IGNORE] * 4]
    assert (tokens.shape, tokens.dtype, targets.dtype) == ((6, 4), torch.int64, torch.int64)


@given(st.integers(0, 80), st.integers(0, 20), st.integers(1, 9), st.integers(1, 5))
def test_every_target_of_the_split_counts_exactly_once(
    length: int, start: int, block_size: int, micro_size: int
) -> None:
    pieces = EvalChunks(numbered(start + length + 10), start, start + length, block_size, micro_size)
    counted: list[int] = []
    for i in range(len(pieces)):
        tokens, targets = pieces[i]
        assert tokens.shape == targets.shape == (micro_size, block_size)
        counts = targets != IGNORE
        assert counts.any()  # no microbatch for nothing
        assert torch.equal(tokens[counts] + 1, targets[counts])
        counted += targets[counts].tolist()
    # All but the first token of the split, which nothing precedes
    assert counted == list(range(start + 1, start + length))
    assert pieces.targets == len(counted)


# --- the two splits of a text ---


@pytest.mark.parametrize(("val_fraction", "border"), [(0.0, 103), (0.1, 93), (0.5, 52)])
@pytest.mark.parametrize(("block_size", "stride"), [(7, 1), (5, 13)])
def test_no_training_sample_touches_a_validation_token(
    tmp_path: Path, val_fraction: float, border: int, block_size: int, stride: int
) -> None:
    path = tmp_path / "source.txt"
    path.write_text("".join(chr(0x4E00 + i) for i in range(103)), encoding="utf-8")  # the token i is at i
    config = TextData(path=str(path), cache_dir=f"{tmp_path}/cache", val_fraction=val_fraction, stride=stride)
    text = config.open(block_size, 8)
    tokens, targets = text.train[range(len(text.train))]
    trained = {*tokens.flatten().tolist(), *targets.flatten().tolist()}
    assert trained <= set(range(border))
    assert stride > 1 or trained == set(range(border))
    split = text.validation
    validated = [t for i in range(len(split)) for t in split[i][1].flatten().tolist() if t != IGNORE]
    assert validated == list(range(border + 1, 103))
