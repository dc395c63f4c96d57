"""Conversations in JSON lines as a source: the loss is that of the answers, and no conversation sees another.

A line is `{"prompt": …, "answer": …}`, or `{"messages": [{"role": …, "content": …}, …]}`. A template spells it
(template.py), or, with data.template=plain, it becomes

    User: What is a GPT?
    Assistant: A language model.<end of text>

There messages of the role `system` stand as they are. What the assistant says counts in the loss, with the end of text
(with characters or bytes: a line feed), and the blank before it: BPE has it in a word's first token. Consecutive
conversations share a sample as long as they fit.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mingpt.cli.console import printable, say
from mingpt.config.datasets import FORMS, PLAIN, ChatData
from mingpt.data.bpe import Encoder, read_tokenizer
from mingpt.data.cache import ArrayFile
from mingpt.data.source import Microbatch, Samples, Source, TextVocabulary, Vocabulary
from mingpt.data.template import Messages, Template, Turn, chatml, with_template
from mingpt.data.text import token_file
from mingpt.data.vocabulary import Bytes, Characters, vocabulary_of
from mingpt.data.windows import PaddedBatches, TokenFile
from mingpt.errors import UserError
from mingpt.model.language import IGNORE

LABELS = {"system": "", "user": "User: ", "assistant": "Assistant:"}
HALF = re.compile("[\ud800-\udfff]")  # JSON may hold a surrogate alone, and UTF-8 and snapshots can't
TOKEN = np.dtype([("token", "<u4"), ("conversation", "<u4"), ("answer", "?")])
JQ = {  # of forms that are known and not read (ShareGPT's, Alpaca's), by a key of theirs: what makes ours of them
    "conversations": """{messages: [.conversations[] | {role: ({human: "user", gpt: "assistant"}[.from] // .from), """
    """content: .value}]}""",
    "instruction": """{prompt: (.instruction + "\\n" + (.input // "") | rtrimstr("\\n")), answer: .output}""",
}
Positions = NDArray[np.int64]
Spell = Callable[[Messages], list[Turn]]


def how_to_map(line: Mapping[str, Any]) -> str:
    """What makes ours of a file of such lines; "" if nothing is known of them."""
    key = next((key for key in JQ if key in line), "")
    return f": jq -c '{JQ[key]}' makes ours of all such lines" if key else ""


def messages_of(line: Any, any_role: bool) -> list[dict[str, Any]]:
    """The messages of a conversation. any_role: its template knows which there are. Raises ValueError if it is none."""
    if not isinstance(line, dict):
        raise ValueError("not a JSON object")
    messages = line.get("messages")
    if messages is None:
        if not {"prompt", "answer"} <= line.keys():
            has = ", ".join(line) or "nothing"
            raise ValueError(f"it has {has}, and neither prompt and answer, nor messages{how_to_map(line)}")
        messages = [{"role": "user", "content": line["prompt"]}, {"role": "assistant", "content": line["answer"]}]
    messages = messages if isinstance(messages, list) else [None]
    for message in messages:
        fields = message if isinstance(message, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        if not (isinstance(role, str) and (any_role or role in LABELS) and isinstance(content, str)):
            raise ValueError(f"a message needs a role ({', '.join(LABELS)}) and a text as content")
        if half := HALF.search(content):
            raise ValueError(f"half a character ({ascii(half[0])[1:-1]}) is in it, which is no text")
        if role == "assistant" and not content.strip():
            raise ValueError("the assistant says nothing")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("the assistant says nothing")
    return messages


def plain(messages: Messages) -> list[Turn]:
    turns = list[Turn]()
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "assistant":
            turns += [(LABELS[role], False), (f" {content}", True)]
        else:
            turns.append((f"{LABELS[role]}{content}\n", False))
    return turns


def _read(raw: bytes, shown: str, spell: Spell, any_role: bool) -> Iterator[list[Turn]]:
    conversation = 0
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.strip():
            conversation += 1
            try:
                yield spell(messages_of(json.loads(line), any_role))
            except (ValueError, RecursionError) as error:
                why = "not JSON" if isinstance(error, json.JSONDecodeError | RecursionError) else str(error)
                where = f"{shown}: line {number} (conversation {conversation})"
                raise UserError(f"{where}: {printable(why)}: mend it, or take it out") from error


def end_of_answer(vocabulary: TextVocabulary) -> int:
    """The token that ends an answer."""
    end: int | None = getattr(vocabulary, "end_of_text", None)
    return vocabulary.encode("\n")[0] if end is None else end


def templates_of(end: str, border: str) -> dict[str, Any]:
    """How Hugging Face's tokenizers spell messages, as `turns_of` does, and read an answer.

    end: what spells the end of an answer. border: stands before each text that is encoded apart from the one before it.
    """
    answer, said = json.dumps(border + LABELS["assistant"]), json.dumps(f"{border} ")
    others = json.dumps({role: border + text for role, text in LABELS.items() if role != "assistant"})
    return {
        "chat_template": (
            "{% for message in messages %}{% set role, text = message['role'], message['content'] %}"
            f"{{% if role == 'assistant' %}}{{{{ {answer} + {said} + text + {json.dumps(end)} }}}}"
            f"{{% elif role in {others} %}}{{{{ {others}[role] + text + '\\n' }}}}"
            "{% else %}{{ raise_exception('a message needs a role (system, user, assistant)') }}{% endif %}{% endfor %}"
            f"{{% if add_generation_prompt %}}{{{{ {answer} }}}}{{% endif %}}"
        ),
        "response_template": response_template(LABELS["assistant"], end),
    }


def response_template(anchor: str, end: str) -> dict[str, Any]:
    """Else transformers reads answers of models of the type qwen3 as Qwen3 was trained to give them."""
    content = {"content": {"content": "text", "close": end}}
    return {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": content}


def _encoded(conversations: list[list[Turn]], vocabulary: TextVocabulary, end: list[int]) -> NDArray[Any]:
    """All conversations, one after the other, as an array of TOKEN. end: tokens that follow an answer."""
    parts = list[NDArray[Any]]()

    def add(number: int, tokens: Sequence[int], counts: Any) -> None:
        part = np.empty(len(tokens), TOKEN)
        part["token"], part["conversation"], part["answer"] = tokens, number, counts
        parts.append(part)

    for number, turns in enumerate(conversations):
        if isinstance(vocabulary, Encoder) and vocabulary.template:  # in one piece, as transformers and servers do
            found = vocabulary.encoding("".join(text for text, _ in turns))
            ends = np.cumsum([len(text) for text, _ in turns])
            turn_of = np.searchsorted(ends, [begin for begin, _ in found.offsets], side="right")
            add(number, found.ids, np.array([*(counts for _, counts in turns), False])[turn_of])
            continue
        for text, counts in turns:
            add(number, [*vocabulary.encode(text), *(end if counts else ())], counts)
    return np.concatenate(parts)


def _vocabulary(config: ChatData, conversations: list[list[Turn]]) -> TextVocabulary:
    if config.tokens == "byte":
        return Bytes()
    characters = {"\n"}
    for turns in conversations:
        for text, _ in turns:
            characters.update(text)
    return Characters("".join(sorted(characters)))


class Conversations(Samples):
    """Rows of at most block_size + 1 tokens: those from `begins[i]` up to `ends[i]`."""

    def __init__(self, tokens: TokenFile, begins: Positions, ends: Positions, block_size: int) -> None:
        self.tokens, self.begins, self.ends, self.block_size = tokens, begins, ends, block_size

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(self, ids: Sequence[int]) -> Microbatch:
        """(tokens, targets, weights, documents), each (len(ids), block_size)."""
        tokens = torch.zeros(len(ids), self.block_size, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORE)
        documents = torch.full_like(tokens, -1)
        for row, i in enumerate(ids):
            part = self.tokens.read(int(self.begins[i]), int(self.ends[i]))
            token = torch.from_numpy(part["token"].astype(np.int64))
            conversation = torch.from_numpy(part["conversation"].astype(np.int64))
            wanted = torch.from_numpy(part["answer"][1:].copy()) & (conversation[1:] == conversation[:-1])
            tokens[row, : len(part) - 1] = token[:-1]
            targets[row, : len(part) - 1] = token[1:].where(wanted, IGNORE)
            documents[row, : len(part) - 1] = conversation[:-1]
        return tokens, targets, torch.ones(tokens.shape), documents


def packed(lengths: NDArray[np.int64], block_size: int) -> tuple[Positions, Positions, int]:
    """(begins, ends) of rows of whole conversations, in their order; and how many are too long for a row."""
    begins, ends, too_long, at = list[int](), list[int](), 0, 0
    for length in lengths.tolist():
        if length > block_size + 1:
            too_long += 1
        elif ends and ends[-1] == at and at + length - begins[-1] <= block_size + 1:
            ends[-1] = at + length
        else:
            begins.append(at)
            ends.append(at + length)
        at += length
    return np.array(begins, np.int64), np.array(ends, np.int64), too_long


def open_chat(config: ChatData, block_size: int, micro_size: int, vocabulary: Vocabulary | None = None) -> Source:
    """The last conversations validate. Raises UserError if a line is none, or all are too long for block_size."""
    shown = f"data.path={config.path}"
    if vocabulary is None and config.tokenizer is not None:
        vocabulary = read_tokenizer(config.tokenizer, "data.tokenizer")
    if config.template != PLAIN and isinstance(vocabulary, Encoder) and not vocabulary.template:
        vocabulary = with_template(vocabulary, config.template)
    path, about = _token_file(config, vocabulary, shown)
    file = TokenFile(path)
    lengths = np.bincount(file.mapped["conversation"])
    border = round(len(lengths) * (1 - config.val_fraction))
    start = int(lengths[:border].sum())
    begins, ends, left_out = packed(lengths[:border], block_size)
    if not len(begins):
        raise UserError(
            f"{shown}: no conversation to train on fits into model.block_size={block_size}: raise it, or give more"
        )
    train = Conversations(file, begins, ends, block_size)
    begins, ends, left_out_too = packed(lengths[border:], block_size)
    if left_out + left_out_too:
        say(
            f"{shown}: {left_out + left_out_too} of {len(lengths)} conversations are longer than "
            f"model.block_size={block_size}, and left out"
        )
    validation = PaddedBatches(Conversations(file, start + begins, start + ends, block_size), micro_size)
    return Source(train, validation, vocabulary_of(about["vocabulary"]), about["sha256"])


def _token_file(config: ChatData, given: Vocabulary | None, shown: str) -> tuple[Path, dict[str, Any]]:
    form, text = config.template, given.template if isinstance(given, Encoder) else chatml()
    spell = plain if form == PLAIN else Template(text, given.specials if isinstance(given, Encoder) else ()).turns

    def make(path: Path, array: ArrayFile) -> dict[str, Any]:
        raw = path.read_bytes()
        conversations = list(_read(raw, shown, spell, form not in FORMS))
        if not conversations:
            raise UserError(f"{shown}: no conversation is in it: give JSON lines")
        own = given or _vocabulary(config, conversations)
        if not isinstance(own, TextVocabulary):
            raise UserError(f"{shown}: the snapshot's vocabulary is none of text: take data that it was trained on")
        try:
            array.append(_encoded(conversations, own, [end_of_answer(own)] if form == PLAIN else []))
        except UserError as error:
            raise UserError(f"{shown}: {error}") from error
        return {"vocabulary": own.to_json(), "sha256": sha256(raw).hexdigest()}

    return token_file(config, given, ["chat", form], make)
