"""mingpt.data.source: one form for every kind of data."""

from pathlib import Path

import pytest

from mingpt.data.source import Source
from mingpt.data.text import TextData
from mingpt.data.vocabulary import Bytes, Characters
from mingpt.errors import UserError


def opened(tmp_path: Path, content: str, vocabulary: Characters | Bytes | None = None, **changes: object) -> Source:
    (tmp_path / "source.txt").write_text(content)
    settings = {"path": str(tmp_path / "source.txt"), "cache_dir": str(tmp_path / "cache")}
    return TextData.model_validate(settings | changes).open(4, 2, vocabulary)


def test_a_snapshots_vocabulary_is_kept(tmp_path: Path) -> None:
    """A model that is fine-tuned or evaluated on another text knows its own characters only."""
    source = opened(tmp_path, "baba" * 10, Characters("abc"))
    assert source.vocabulary == Characters("abc")
    assert source.train[[0]][0].tolist() == [[1, 0, 1, 0]]
    assert opened(tmp_path, "baba" * 10).vocabulary == Characters("ab")  # and it has a cache entry of its own
    as_bytes = opened(tmp_path, "baba" * 10, Bytes())
    assert as_bytes.train[[0]][0].tolist() == [[98, 97, 98, 97]]


def test_a_text_that_a_snapshots_vocabulary_cannot_spell_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.path=.*: the text has characters that the model never saw: 'xz'"):
        opened(tmp_path, "abxz" * 10, Characters("abc"))
