"""Encodes blocks of documents in several processes. Each process imports this file, which therefore needs no torch."""

import multiprocessing
import os
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from typing import Any

import numpy as np

from mingpt.data.bpe import GPT2Tokens, HuggingFaceTokens
from mingpt.data.dataset import dtype_for
from mingpt.data.vocabulary import vocabulary_of
from mingpt.errors import UserError
from mingpt.prepare.documents import Block
from mingpt.world.lifetime import children_ignore_signals, end_with_parent

AHEAD = 3  # blocks for each process that are read in advance

Tokenizer = GPT2Tokens | HuggingFaceTokens
_tokenizer: Tokenizer | None = None  # set in each process of the pool


def encode(tokenizer: Tokenizer, block: Block) -> list[bytes]:
    """Each piece's tokens, with the end of text after each document, as little-endian integers.

    Raises UserError if the tokenizer cannot encode a text.
    """
    dtype = np.dtype(dtype_for(tokenizer.size)).newbyteorder("<")
    end = np.array([tokenizer.end_of_text], dtype).tobytes()
    try:
        return [np.array(tokenizer.encode(text), dtype).tobytes() + end * ends for text, ends, _ in block.pieces]
    except UserError as error:
        raise UserError(f"{block.file.shown}: --tokenizer: {error}") from error


def _begin(parent: int, vocabulary: dict[str, Any]) -> None:
    global _tokenizer
    end_with_parent(parent)
    tokenizer = vocabulary_of(vocabulary)
    assert isinstance(tokenizer, Tokenizer)
    _tokenizer = tokenizer


def _encode(block: Block) -> list[bytes]:
    assert _tokenizer
    return encode(_tokenizer, block)


def encoded(
    work: Iterable[Block], tokenizer: Tokenizer, processes: int
) -> Generator[tuple[Block, list[bytes]], None, None]:
    """Each block and its pieces' tokens, in the order of the blocks, whichever process encodes them."""
    if processes == 1:
        yield from ((block, encode(tokenizer, block)) for block in work)
        return
    spawn = multiprocessing.get_context("spawn")  # not fork, which fsspec's threads do not survive
    with ProcessPoolExecutor(processes, spawn, _begin, (os.getpid(), tokenizer.to_json())) as pool:
        going: deque[tuple[Block, Future[list[bytes]]]] = deque()
        blocks_left = iter(work)
        try:
            while True:
                for block in islice(blocks_left, max(0, AHEAD * processes - len(going))):
                    with children_ignore_signals():  # submit may start a process
                        going.append((block, pool.submit(_encode, block)))
                if not going:
                    return
                block, future = going.popleft()
                yield block, future.result()
        finally:
            pool.shutdown(cancel_futures=True)
