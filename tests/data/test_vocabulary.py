"""mingpt.data.vocabulary: what a snapshot's manifest gives back, and what it can't make a reader do."""

import pytest

from mingpt.data.vocabulary import Numbers, vocabulary_of
from mingpt.errors import UserError


@pytest.mark.parametrize(
    ("content", "about"),
    [
        ({}, "char, byte"),
        ({"kind": ["char"]}, "char, byte"),
        ({"kind": "os.system"}, "char, byte"),
        ({"kind": "char"}, "characters"),
        *(({"kind": "gpt2", "merges": merges}, "gpt2") for merges in (5, "a b c", "a 漢", "a b\na b")),
        *(({"kind": "tokenizer.json", "text": text}, "tokenizer") for text in ("/etc/passwd", '{"model": {}}')),
    ],
)
def test_a_strangers_vocabulary_is_refused(content: dict[str, object], about: str) -> None:
    with pytest.raises(UserError, match=about):
        vocabulary_of(content)


def test_numbers_are_their_own_text() -> None:
    assert Numbers(12).decode(Numbers(12).encode("11 0 3")) == "11 0 3"
    for text in ("12", "-1", "a", "", "1.5"):
        with pytest.raises(UserError, match="from 0 to 11"):
            Numbers(12).encode(text)
