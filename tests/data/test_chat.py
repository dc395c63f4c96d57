"""data=chat: what a conversation becomes, which tokens count, and that no conversation sees another."""

import json
from pathlib import Path
from typing import Any

import pytest

from mingpt.config.datasets import ChatData
from mingpt.data.chat import open_chat
from mingpt.data.source import Source, TextVocabulary
from mingpt.data.vocabulary import Bytes
from mingpt.errors import UserError
from mingpt.model.language import IGNORE
from tests.kits.told import Told

ASKED = [{"prompt": f"{n}+1", "answer": f"{n + 1}"} for n in range(10)]  # each 26 characters


def chat(folder: Path, *lines: Any, block_size: int = 60, **settings: Any) -> Source:
    path = folder / "chat.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    config = {"path": str(path), "cache_dir": str(folder / "cache")} | settings
    return open_chat(ChatData.model_validate(config), block_size, 2)


def shown(source: Source, row: int) -> list[tuple[str, str]]:
    """For each conversation of a sample: its text, and the part of it that is to be predicted."""
    tokens, targets, weights, documents = (x[0] for x in source.train[[row]])
    vocabulary = source.vocabulary
    assert isinstance(vocabulary, TextVocabulary)
    assert weights.tolist() == [1] * len(tokens)
    return [
        (
            vocabulary.decode(tokens[documents == number].tolist()),
            vocabulary.decode(targets[(documents == number) & (targets != IGNORE)].tolist()),
        )
        for number in documents.unique().tolist()
        if number >= 0
    ]


def test_the_answers_count_and_nothing_else(tmp_path: Path) -> None:
    source = chat(tmp_path, *ASKED, val_fraction=0)
    assert shown(source, 0) == [
        ("User: 0+1\nAssistant: 1\n", " 1\n"),
        ("User: 1+1\nAssistant: 2", " 2\n"),  # the sample's last token is a target alone
    ]
    assert (len(source.train), len(source.validation)) == (5, 0)
    turns = (("system", "Be brief."), ("user", "2?"), ("assistant", "3"), ("user", "4?"), ("assistant", "5"))
    line = {"messages": [{"role": role, "content": content} for role, content in turns]}
    assert shown(chat(tmp_path, line, block_size=80, val_fraction=0), 0) == [
        ("Be brief.\nUser: 2?\nAssistant: 3\nUser: 4?\nAssistant: 5", " 3\n 5\n")
    ]


def test_the_last_ones_validate_and_share_a_vocabulary(tmp_path: Path) -> None:
    source = chat(tmp_path, *ASKED, tokens="byte", val_fraction=0.3)
    assert source.vocabulary == Bytes()
    assert (len(source.train), len(source.validation)) == (4, 1)
    tokens, targets, _, _ = source.validation[0]
    rows = [bytes(row[row != IGNORE].tolist()).decode() for row in targets]
    assert rows == [" 8\n 9\n", " 10\n"]
    assert bytes(tokens[1, :9].tolist()).decode() == "User: 9+1"


def test_what_is_too_long_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = chat(tmp_path, ASKED[0], {"prompt": "x" * 99, "answer": "y"}, ASKED[1], val_fraction=0)
    assert len(source.train) == 2
    assert "model.block_size=60" in capsys.readouterr().out
    for lines in (ASKED, []):
        with pytest.raises(UserError):
            chat(tmp_path, *lines, block_size=7)


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a"}',
        "[1]",
        "{",
        '{"messages": 3}',
        '{"messages": [{"role": ["user"], "content": "a"}]}',
        '{"messages": [{"role": "user", "content": "a"}]}',
        '{"messages": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": " "}]}',
        '{"prompt": "a", "answer": 3}',
        r'{"prompt": "a\ud800b", "answer": "hello"}',
        '{"instruction": "a", "input": "", "output": "b"}',
        '{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}',
    ],
    ids=range(11),
)
def test_a_line_that_is_no_conversation(tmp_path: Path, line: str, told: Told) -> None:
    with told.mistake(tmp_path):
        chat(tmp_path, ASKED[0], "", line)
