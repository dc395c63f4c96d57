"""What kinds of data have that come from files."""

from typing import Annotated

from pydantic import Field

from mingpt.config.kinds import Data
from mingpt.config.section import NO_RESULT


class CachedData(Data):
    """Data from files, of which each node keeps a tokenized or downloaded copy."""

    cache_dir: Annotated[str, NO_RESULT] = Field(default="~/.cache/mingpt", min_length=1)
    """A local folder for tokenized or downloaded data, shared by the processes of a node."""
    cache_timeout_seconds: Annotated[float, NO_RESULT] = Field(default=600, gt=0)
    """Longest wait for another process of the node that is tokenizing or downloading, without progress of that."""


class RowData(CachedData):
    """Data that is one long row of tokens, out of which samples are cut."""

    stride: int = Field(default=1, ge=1)
    """Tokens between the starts of two samples. 1: every position; block_size: each token once an epoch."""
