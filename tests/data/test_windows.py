"""mingpt.data.windows: what is trained on, what is validated on, and that they never meet."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mingpt.data.kinds.text import TextData
from mingpt.data.source import Samples, Source
from mingpt.data.text import open_text
from mingpt.data.windows import EvalChunks, TokenFile, WindowDataset
from mingpt.model.language import IGNORE


def numbered(length: int) -> TokenFile:
    """A row in which the token at position i is i."""
    tokens = TokenFile(Path("no-such-file"))
    tokens._mapped = np.arange(length, dtype=np.uint16)
    return tokens


def counting(
    length: int, start: int = 0, stop: int | None = None, block_size: int = 4, stride: int = 1
) -> WindowDataset:
    return WindowDataset(numbered(length), start, length if stop is None else stop, block_size, stride)


def pieces_of(length: int, start: int, stop: int, block_size: int, micro_size: int) -> EvalChunks:
    return EvalChunks(numbered(length), start, stop, block_size, micro_size)


def split_text(tmp_path: Path, length: int, val_fraction: float, block_size: int, stride: int = 1) -> Source:
    (tmp_path / "source.txt").write_text("".join(chr(0x4E00 + i) for i in range(length)), encoding="utf-8")
    config = TextData(
        path=str(tmp_path / "source.txt"),
        cache_dir=str(tmp_path / "cache"),
        val_fraction=val_fraction,
        stride=stride,
    )
    return open_text(config, block_size, micro_size=8)


def positions(windows: Samples) -> set[int]:
    """Every position that a sample touches, the targets' included; the texts here have the token i at i."""
    if not len(windows):
        return set()
    tokens, targets = windows[range(len(windows))]
    return set(tokens.flatten().tolist()) | set(targets.flatten().tolist())


def validated(text: Source) -> list[int]:
    """The targets that count in validation, in order."""
    split = text.validation
    return [t for i in range(len(split)) for t in split[i][1].flatten().tolist() if t != IGNORE]


# --- windows ---


def test_a_window_is_a_block_and_its_targets_are_one_later() -> None:
    windows = counting(20, start=5, stop=15)
    tokens, targets = windows[[0, 5, 2]]
    assert tokens.tolist() == [[5, 6, 7, 8], [10, 11, 12, 13], [7, 8, 9, 10]]
    assert targets.tolist() == [[6, 7, 8, 9], [11, 12, 13, 14], [8, 9, 10, 11]]
    assert (tokens.dtype, targets.dtype) == (torch.int64, torch.int64)


def test_the_stride_is_the_distance_of_the_samples_starts() -> None:
    windows = counting(20, block_size=4, stride=3)
    assert len(windows) == 6
    assert windows[[0, 1, 5]][0].tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [15, 16, 17, 18]]


@given(st.integers(0, 60), st.integers(0, 20), st.integers(1, 12), st.integers(1, 15))
def test_windows_are_all_that_fit_and_no_more(length: int, start: int, block_size: int, stride: int) -> None:
    windows = counting(start + length + 10, start, start + length, block_size, stride)
    starts = [s for s in range(start, start + length, stride) if s + block_size < start + length]
    assert len(windows) == len(starts)
    if starts:
        tokens, targets = windows[range(len(windows))]
        assert tokens[:, 0].tolist() == starts
        assert int(targets.max()) < start + length


def test_only_the_path_of_a_window_travels_to_another_process(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(100_000, dtype=np.uint32))
    windows = WindowDataset(TokenFile(tmp_path / "tokens.npy"), 0, 100_000, 8, 1)
    expected = windows[[7, 99_000]]
    pickled = pickle.dumps(windows)
    assert len(pickled) < 1000
    for ours, theirs in zip(pickle.loads(pickled)[[7, 99_000]], expected, strict=True):
        assert torch.equal(ours, theirs)
    assert isinstance(windows.tokens, TokenFile)
    assert isinstance(windows.tokens.mapped, np.memmap)  # one copy in memory for all processes of the node


# --- EvalChunks ---


def test_pieces_are_consecutive_and_the_last_is_filled_with_ignored_targets() -> None:
    pieces = pieces_of(30, start=3, stop=24, block_size=4, micro_size=2)
    assert (len(pieces), pieces.targets) == (3, 20)
    x = IGNORE
    expected = [
        ([[3, 4, 5, 6], [7, 8, 9, 10]], [[4, 5, 6, 7], [8, 9, 10, 11]]),
        ([[11, 12, 13, 14], [15, 16, 17, 18]], [[12, 13, 14, 15], [16, 17, 18, 19]]),
        ([[19, 20, 21, 22], [0, 0, 0, 0]], [[20, 21, 22, 23], [x, x, x, x]]),
    ]
    for i, (tokens, targets) in enumerate(expected):
        ours = pieces[i]
        assert ours[0].tolist() == tokens
        assert ours[1].tolist() == targets
        assert (ours[0].dtype, ours[1].dtype) == (torch.int64, torch.int64)


def test_a_piece_may_end_in_the_middle_of_a_row() -> None:
    pieces = pieces_of(30, start=0, stop=7, block_size=4, micro_size=2)
    assert len(pieces) == 1
    tokens, targets = pieces[0]
    assert tokens.tolist() == [[0, 1, 2, 3], [4, 5, 0, 0]]
    assert targets.tolist() == [[1, 2, 3, 4], [5, 6, IGNORE, IGNORE]]


@given(st.integers(0, 80), st.integers(0, 20), st.integers(1, 9), st.integers(1, 5))
def test_every_target_of_the_split_counts_exactly_once(
    length: int, start: int, block_size: int, micro_size: int
) -> None:
    pieces = pieces_of(start + length + 10, start, start + length, block_size, micro_size)
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


@pytest.mark.parametrize("val_fraction", [0.0, 0.1, 0.25, 0.5])
@pytest.mark.parametrize(("block_size", "stride"), [(1, 1), (7, 1), (8, 8), (5, 13)])
def test_no_training_sample_touches_a_validation_token(
    tmp_path: Path, val_fraction: float, block_size: int, stride: int
) -> None:
    text = split_text(tmp_path, 103, val_fraction, block_size, stride)
    border = {0.0: 103, 0.1: 93, 0.25: 77, 0.5: 52}[val_fraction]
    train, validation = positions(text.train), validated(text)
    assert train <= set(range(border))
    assert validation == list(range(border + 1, 103))


def test_with_stride_1_every_token_before_the_border_is_trained_on(tmp_path: Path) -> None:
    text = split_text(tmp_path, 100, 0.1, 8)
    assert positions(text.train) == set(range(90))
    assert validated(text) == list(range(91, 100))
    assert (len(text.train), len(text.validation)) == (82, 1)


def test_without_a_validation_share_there_is_nothing_to_validate(tmp_path: Path) -> None:
    text = split_text(tmp_path, 50, 0.0, 8)
    assert len(text.validation) == 0
    assert positions(text.train) == set(range(50))
