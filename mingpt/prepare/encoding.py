"""Encodes blocks of documents in several processes. Each process imports this file, which therefore needs no torch."""

import multiprocessing
import os
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mingpt.data.bpe import GPT2Tokens, HuggingFaceTokens
from mingpt.data.dataset import SPLITS, Split, dtype_for
from mingpt.data.vocabulary import vocabulary_of
from mingpt.errors import UserError
from mingpt.prepare.documents import Block, Options, pieces_of
from mingpt.world.lifetime import children_ignore_signals, end_with_parent

AHEAD = 3  # blocks for each process that are read in advance

Tokenizer = GPT2Tokens | HuggingFaceTokens


class Encoded(NamedTuple):
    """A block's tokens of each split, as bytes, and the problem of each line that was left out.

    ends: where the documents end that end in this block: a row for each, the tokens of each split up to its end.
    """

    rows: dict[Split, bytes]
    bad: list[str]
    ends: NDArray[np.int64]

    def up_to(self, tokens: int, width: int) -> "Encoded | None":
        """The same, up to the end of the first document with which there are `tokens`; None if there are fewer.

        width: bytes of a token.
        """
        reached = np.flatnonzero(self.ends.sum(axis=1) >= tokens)
        if not len(reached):
            return None
        ends = self.ends[: reached[0] + 1]
        rows = {split: raw[: int(ends[-1, SPLITS.index(split)]) * width] for split, raw in self.rows.items()}
        return Encoded(rows, self.bad, ends)


class Encoder:
    """Encodes a block. most_bad: a block with more bad lines than this ends early, since all blocks together may have
    only as many. Calling it raises UserError if the tokenizer cannot encode a text.
    """

    def __init__(self, tokenizer: Tokenizer, options: Options, most_bad: int) -> None:
        self.tokenizer, self.options, self.most_bad = tokenizer, options, most_bad
        self.dtype = np.dtype(dtype_for(tokenizer.size)).newbyteorder("<")
        self.end = np.array([tokenizer.end_of_text], dtype=np.uint32)

    def __call__(self, block: Block) -> Encoded:
        rows: dict[Split, list[Any]] = {split: [] for split in SPLITS}
        counts, ends = dict.fromkeys(SPLITS, 0), list[list[int]]()
        bad = list[str]()
        for piece in pieces_of(block, self.options, bad, self.most_bad):
            split: Split = "validation" if piece.validation else "train"
            try:
                tokens = self.tokenizer.encode_array(piece.text)
            except UserError as error:
                raise UserError(f"{block.file.shown}: --tokenizer: {error}") from error
            rows[split] += [tokens, self.end] if piece.ends else [tokens]
            counts[split] += len(tokens) + piece.ends
            if piece.ends:
                ends.append([*counts.values()])
        joined = {split: np.concatenate(row).astype(self.dtype).tobytes() for split, row in rows.items() if row}
        return Encoded(joined, bad, np.array(ends, dtype=np.int64).reshape(-1, len(SPLITS)))


_encoder: Encoder | None = None  # set in each process of the pool


def _begin(parent: int, vocabulary: dict[str, Any], options: Options, most_bad: int) -> None:
    global _encoder
    end_with_parent(parent)
    tokenizer = vocabulary_of(vocabulary)
    assert isinstance(tokenizer, Tokenizer)
    _encoder = Encoder(tokenizer, options, most_bad)


def _encode(block: Block) -> Encoded:
    assert _encoder
    return _encoder(block)


def encoded(
    work: Iterable[Block], tokenizer: Tokenizer, options: Options, processes: int, most_bad: int
) -> Generator[tuple[Block, Encoded], None, None]:
    """Each block, without its content, and its tokens, in the order of the blocks, whichever process encodes them."""
    if processes == 1:
        encoder = Encoder(tokenizer, options, most_bad)
        yield from ((block, encoder(block)) for block in work)
        return
    begin = (os.getpid(), tokenizer.to_json(), options, most_bad)
    spawn = multiprocessing.get_context("spawn")  # not fork, which fsspec's threads do not survive
    with ProcessPoolExecutor(processes, spawn, _begin, begin) as pool:
        going: deque[tuple[Block, Future[Encoded]]] = deque()
        blocks_left = iter(work)
        try:
            while True:
                for block in islice(blocks_left, max(0, AHEAD * processes - len(going))):
                    with children_ignore_signals():  # submit may start a process
                        future = pool.submit(_encode, block)
                    going.append((replace(block, pieces=(), lines=b""), future))
                if not going:
                    return
                block, future = going.popleft()
                yield block, future.result()
        finally:
            pool.shutdown(cancel_futures=True)
