"""data.template: conversations have the tokens that transformers gives them, and the loss counts the answers alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mingpt.config.datasets import ChatData
from mingpt.data.bpe import BYTE_LEVEL
from mingpt.data.chat import open_chat
from mingpt.data.source import Source, TextVocabulary
from mingpt.data.template import read_template
from mingpt.data.vocabulary import vocabulary_of
from mingpt.errors import UserError
from mingpt.model.language import IGNORE
from mingpt.train.resume import changed
from mingpt.weights.writing import folder_of, write_folder
from tests.kits import bpe_kit
from tests.kits.config_kit import configured, problems
from tests.kits.told import Told
from tests.kits.weights_kit import ours

# White space at borders, a message that spells a special token, answers in a row, thoughts.
IN_A_ROW = [("user", "é 漢"), ("assistant", "  lo "), ("assistant", "lon 🙂"), ("user", "User: ")]
CHATS = [
    [("user", "the king?"), ("assistant", "in woe")],
    [("system", " Be long. \n"), ("user", " woe \n\n"), ("assistant", "the\n1"), ("user", "\n"), ("assistant", " lo ")],
    IN_A_ROW,
    [("user", "1"), ("assistant", "the king"), ("user", "!"), ("assistant", "\n\nthe")],
    [("user", "<|endoftext|>"), ("assistant", "1")],
]


def marked(body: str) -> str:
    """What is said, with transformers' marks where the assistant says it."""
    answer = f"{{% if message.role == 'assistant' %}}{{% generation %}}{body}{{% endgeneration %}}"
    return f"{answer}{{% else %}}{body}{{% endif %}}"


ASKED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    + marked("{{ message['content'] + '<|im_end|>' }}")
    + "{{ '\n' }}{% endfor %}"
    + ASKED
)
# As Llama's: a token begins all, texts are trimmed.
TRIMMED = (
    "{{- bos_token }}\n{%- if tools is not none %}{{ raise_exception('tools') }}{% endif %}\n"
    "{%- for message in messages %}\n    {{- '<head>' + message.role + '<tail>\n\n' }}"
    + marked("{{ message.content | trim + '<eot>' }}")
    + "{% endfor %}{% if add_generation_prompt %}{{ '<head>assistant<tail>\n\n' }}{% endif %}"
)
# As Qwen3's: only the last answer has thoughts.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\n' }}"
    + marked("{% if message.role == 'assistant' and loop.last %}<think>{% endif %}{{ message.content }}<|im_end|>")
    + "{{ '\n' }}{% endfor %}"
    + ASKED
)
LETTERS = (
    "{% for message in messages %}{{ '### ' + message.role + '\n' }}"
    + marked("{{ message.content + '\n\n' }}")
    + "{% endfor %}{% if add_generation_prompt %}{{ '### assistant\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
FORMS = {
    "chatml": (CHATML, CHATML_TOKENS),
    "trimmed": (TRIMMED, ("<head>", "<tail>", "<eot>")),
    "thinking": (THINKING, CHATML_TOKENS),
    "letters": (LETTERS, ()),
}


def messages(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def opened(folder: Path, chats: list[Any], **settings: Any) -> Source:
    """All in one sample, and one more, whose last token is no input."""
    (folder / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": messages(c)}) + "\n" for c in [*chats, CHATS[0]])
    )
    config = {"path": f"{folder}/chats.jsonl", "cache_dir": f"{folder}/cache", "val_fraction": 0} | settings
    return open_chat(ChatData.model_validate(config), 2000, 1)


def conversations(source: Source) -> list[tuple[list[int], list[int]]]:
    """Each one's tokens, and whether each of them counts."""
    tokens, targets, _, documents = (x[0] for x in source.train[[0]])
    counts = (targets != IGNORE).int().roll(1)  # a target is the next token
    return [(tokens[documents == n].tolist(), counts[documents == n].tolist()) for n in range(int(documents.max()))]


def write(folder: Path, template: str, specials: tuple[str, ...], odd: bool = False) -> str:
    """A tokenizer's folder, with its template in a file of its own.

    odd: it begins a text with a blank of its own, and says that tokens begin after their blanks.
    """
    file = bpe_kit.write_tokenizer(folder, *specials)
    if odd:
        parts = {"normalizer": {"type": "Prepend", "prepend": " "}, "post_processor": BYTE_LEVEL}
        file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    (folder / "chat_template.jinja").write_text(template)
    tokens = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return str(folder)


@pytest.mark.parametrize("form", [*FORMS, "chatml of ours", "chatml odd"])
def test_tokens_and_answers_are_those_of_transformers(tmp_path: Path, form: str) -> None:
    template, specials = FORMS[form.split()[0]]
    folder = write(tmp_path / "tokenizer", template, specials, form == "chatml odd")
    ours = "chatml" if form == "chatml of ours" else folder
    chats = [chat for chat in CHATS if form != "thinking" or chat != IN_A_ROW]
    found = conversations(opened(tmp_path, chats, tokens="bpe", tokenizer=folder, template=ours))
    fast: Any = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", bos_token="<|endoftext|>")
    fast.backend_tokenizer.no_truncation()
    fast.backend_tokenizer.no_padding()
    for chat, (tokens, _) in zip(chats, found, strict=True):
        assert tokens == fast.apply_chat_template(messages(chat), chat_template=template)["input_ids"]
    fast.backend_tokenizer.post_processor = None  # whose offsets make transformers lose answers that begin with a blank
    for chat, (_, counts) in zip(chats, found, strict=True):
        wanted = fast.apply_chat_template(
            messages(chat), chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        assert counts == wanted["assistant_masks"]


@pytest.mark.parametrize("kind", ["char", "byte", "gpt2", "tokenizer.json", "chatml"])
@pytest.mark.parametrize("template", ["chatml", "plain"])
def test_an_export_spells_chats_as_training_did(tmp_path: Path, kind: str, template: str) -> None:
    """In ChatML; where no token ends a message, the end of a text does."""
    bpe = bpe_kit.write_gpt2(tmp_path / "gpt2") if kind == "gpt2" else tmp_path / "tokenizer"
    bpe_kit.write_tokenizer(tmp_path / "tokenizer", *(CHATML_TOKENS if kind == "chatml" else ()))
    tokens = {"tokens": kind} if kind in ("char", "byte") else {"tokens": "bpe", "tokenizer": str(bpe)}
    letters = kind in ("char", "byte")  # which have no token for an end: a line feed may stand in an answer
    chats = CHATS[: None if letters or template == "chatml" else -1]  # there "<|endoftext|>" is the end of a text
    source = opened(tmp_path, chats, template=template, **tokens)
    vocabulary = source.vocabulary
    assert isinstance(vocabulary, TextVocabulary)
    assert vocabulary_of(vocabulary.to_json()) == vocabulary
    write_folder(f"{tmp_path}/out", folder_of(ours(vocab_size=vocabulary.size), vocabulary, template), overwrite=False)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation.get("eos_token_id") == theirs.eos_token_id  # where a server ends an answer
    endless = letters and template == "chatml"
    assert (theirs.eos_token is None, "response_template" in theirs.init_kwargs) == (endless, not endless)
    for chat, (found, counts) in zip(chats, conversations(source), strict=True):
        assert theirs.apply_chat_template(messages(chat))["input_ids"] == found
        last = [t for t, counted in zip(found, counts, strict=True) if counted][-1]
        assert theirs.eos_token_id in (None, last)
    asked, given = messages(CHATS[0][:1]), {"add_generation_prompt": True}
    ids = theirs.apply_chat_template(asked, **given)["input_ids"]
    assert ids == conversations(source)[0][0][: len(ids)]
    if template == "chatml":
        assert vocabulary.encode(theirs.apply_chat_template(asked, tokenize=False, **given)) == ids


def test_new_runs_have_chatml_and_a_config_without_the_key_is_of_before(tmp_path: Path) -> None:
    for how in ("data=chat", "data.kind=chat"):
        assert configured(how, "data.path=x").data.model_dump()["template"] == "chatml"
    assert ChatData.model_validate({"path": "x"}).template == "plain"
    name, settings = "data.template", {"kind": "chat", "path": "x"}
    assert changed({"data": settings}, {"data": settings | {"template": "chatml"}}) == {name: ["plain", "chatml"]}
    # What a template at a place spells, the vocabulary has.
    assert changed({"data": settings | {"template": "a"}}, {"data": settings | {"template": "b"}}) == {}


WRONG = {
    "refused": ("{{ raise_exception('no system here') if messages[0].role == 'system' }}" + CHATML, CHATS[1]),
    "role": ("chatml", [("robot", "1"), ("assistant", "2")]),
    "fails": (
        "{{ 1 // (messages[0].content | length - 1) if messages }}" + CHATML,
        [("user", "!"), ("assistant", "1")],
    ),
    "unsafe": ("{{ messages.append(1) }}" + CHATML, None),
    "reaches out": ("{{ messages.__class__.__mro__[1] }}" + CHATML, None),
    "the time": ("{{ strftime_now('%Y') }}" + CHATML, None),
    "otherwise": (THINKING, IN_A_ROW),
    "never an answer": ("{{ messages | length }}" + CHATML, None),
    "no Jinja": ("{% for %}", None),
    "none there": (None, None),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_template_or_a_conversation(tmp_path: Path, case: str, told: Told) -> None:
    template, chat = WRONG[case]
    folder = write(tmp_path / "tokenizer", template or "", CHATML_TOKENS)
    where = "chatml" if template == "chatml" else folder
    with told.mistake(tmp_path):
        opened(tmp_path, [CHATS[0], chat or CHATS[0]], tokens="bpe", tokenizer=folder, template=where)


NAMED = [{"name": "tool_use", "template": "{{ tools }}"}, {"name": "default", "template": CHATML}]


def test_a_config_has_one_template_or_named_ones_of_which_default_is_taken_as_transformers_does(
    tmp_path: Path,
) -> None:
    for form in (CHATML, NAMED, {each["name"]: each["template"] for each in NAMED}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": form}))
        assert read_template(str(tmp_path)) == CHATML


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"chat_template": 1}', '{"chat_template": [{"name": "tool_use", "template": "x"}]}',
                '{"chat_template": [1]}', '{"chat_template": "{{ bos_token }}", "bos_token": 1}', "\udcff"],
)  # fmt: skip
def test_a_damaged_template_of_a_tokenizer_is_not_called_absent(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=rf"^data\.template={tmp_path}: the chat_template is damaged, or .* default \("):
        read_template(str(tmp_path))


def test_a_template_of_a_tokenizer_needs_its_tokens(told: Told) -> None:
    told(problems("data=chat", "data.path=x", "data.template=OWNER/NAME"))
