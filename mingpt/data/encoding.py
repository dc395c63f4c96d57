"""Blocks of documents to tokens, in several processes at once. They import this file, so it needs no torch."""

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from typing import Any

import numpy as np

from mingpt.data.bpe import GPT2Tokens, HuggingFaceTokens
from mingpt.data.dataset import SPLITS, Split, dtype_for
from mingpt.data.documents import Block, Options, pieces_of
from mingpt.data.vocabulary import vocabulary_of
from mingpt.lifetime import children_ignore_signals, end_with_parent

AHEAD = 3  # blocks for each process that are read before they are needed

Encoded = dict[Split, bytes]
Tokenizer = GPT2Tokens | HuggingFaceTokens


class Encoder:
    """A process's tokenizer."""

    def __init__(self, tokenizer: Tokenizer, options: Options) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.dtype = np.dtype(dtype_for(tokenizer.size)).newbyteorder("<")
        self.end = np.array([tokenizer.end_of_text], dtype=np.uint32)

    def __call__(self, block: Block) -> Encoded:
        rows: dict[Split, list[Any]] = {split: [] for split in SPLITS}
        for piece in pieces_of(block, self.options):
            row = rows["validation" if piece.validation else "train"]
            row.append(self.tokenizer.encode_array(piece.text))
            if piece.ends:
                row.append(self.end)
        return {split: np.concatenate(row).astype(self.dtype).tobytes() for split, row in rows.items() if row}


_encoder: Encoder | None = None  # of a process of the pool


def _begin(parent: int, vocabulary: dict[str, Any], options: Options) -> None:
    global _encoder
    end_with_parent(parent)
    tokenizer = vocabulary_of(vocabulary)
    assert isinstance(tokenizer, Tokenizer)
    _encoder = Encoder(tokenizer, options)


def _encode(block: Block) -> Encoded:
    assert _encoder
    return _encoder(block)


def encoded(
    work: Iterable[Block], tokenizer: Tokenizer, options: Options, processes: int
) -> Iterator[tuple[Block, Encoded]]:
    """Each block with its tokens, in the order of the blocks, whoever encodes them."""
    if processes == 1:
        encoder = Encoder(tokenizer, options)
        yield from ((block, encoder(block)) for block in work)
        return
    begin = (os.getpid(), tokenizer.to_json(), options)
    spawn = multiprocessing.get_context("spawn")  # fsspec's threads do not survive a fork
    with ProcessPoolExecutor(processes, spawn, _begin, begin) as pool:
        going: deque[tuple[Block, Future[Encoded]]] = deque()
        blocks_left = iter(work)
        try:
            while True:
                for block in islice(blocks_left, max(0, AHEAD * processes - len(going))):
                    with children_ignore_signals():  # a process may be started here
                        future = pool.submit(_encode, block)
                    going.append((Block(block.file, block.size), future))
                if not going:
                    return
                block, future = going.popleft()
                yield block, future.result()
        finally:
            pool.shutdown(cancel_futures=True)
