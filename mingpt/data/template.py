"""How a Jinja template spells a conversation: ChatML, or the `chat_template` of a Hugging Face tokenizer.

Templates run as in transformers: in Jinja's sandbox, with the same names. But they know no time of day
(`strftime_now`), on which a run's tokens must not depend.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from jinja2 import TemplateError, ext, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mingpt.cli.console import printable
from mingpt.config.datasets import CHATML, TEMPLATE
from mingpt.data.bpe import ENDS, FILE_LIMIT, Encoder
from mingpt.errors import UserError
from mingpt.files.folder import ModelFolder

START, END = "<|im_start|>", "<|im_end|>"
JINJA, CONFIG = "chat_template.jinja", "tokenizer_config.json"
TRIAL = [{"role": role, "content": role} for role in ("user", "assistant")]

Turn = tuple[str, bool]  # a text, and whether the loss counts it
Messages = Sequence[dict[str, Any]]


class _Generation(ext.Extension):
    """`{% generation %}` marks an answer, for trainers that ask the template where it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda x, **options: json.dumps(x, **{"ensure_ascii": False, **options})
    environment.globals["raise_exception"] = _refuse
    return environment


class Template:
    """specials: texts that are one token each, and end an answer."""

    def __init__(self, text: str, specials: Iterable[str]) -> None:
        self.specials = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        try:
            self._compiled = _environment().from_string(text)
        except (TemplateError, RecursionError) as error:
            raise UserError(f"{TEMPLATE}: no template of Jinja: {printable(str(error))}: mend it") from error

    def turns(self, messages: Messages) -> list[Turn]:
        """The conversation, cut where answers begin and end. Raises ValueError, which says what is wrong.

        An answer begins after what asks for one (`add_generation_prompt`), and ends with the next special token: where
        a server stops. In a template without such tokens it ends where the template ends the message.
        """
        whole, at, turns = self._render(messages), 0, list[Turn]()
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                begin = self._begins(whole, messages[:number], True)
                closed = self.specials.search(whole, begin)
                end = closed.end() if closed else self._begins(whole, messages[: number + 1], False)
                turns += [(whole[at:begin], False), (whole[begin:end], True)]
                at = end
        return [*turns, (whole[at:], False)]

    def _begins(self, whole: str, messages: Messages, answer: bool) -> int:
        """The length of what the first messages are in the whole conversation."""
        before = self._render(messages, answer)
        if not whole.startswith(before):
            raise ValueError(
                "the template spells a message otherwise once others follow, which hides where an answer begins"
            )
        return len(before)

    def _render(self, messages: Messages, answer: bool = False) -> str:
        try:
            return self._compiled.render(messages=messages, add_generation_prompt=answer, tools=None, documents=None)
        except TemplateError as error:
            raise ValueError(f"the template refuses it: {error}") from error
        except Exception as error:  # a template may do all that an expression can
            raise ValueError(f"the template fails on it: {type(error).__name__}: {error}") from error


def chatml(specials: Sequence[str] = ()) -> str:
    """A message ends with a token, also where the tokenizer is not made for ChatML, so that a server can stop there."""
    end = next((token for token in (END, *ENDS) if token in specials), END)
    message = f"'{START}' + message['role'] + '\\n' + message['content'] + '{end}\\n'"
    begin = f"{{% if add_generation_prompt %}}{{{{ '{START}assistant\\n' }}}}{{% endif %}}"
    return f"{{% for message in messages %}}{{{{ {message} }}}}{{% endfor %}}{begin}"


def with_template(vocabulary: Encoder, template: str) -> Encoder:
    """The vocabulary with data.template. Raises UserError if that can't be read, or spells no answer."""
    text = chatml(vocabulary.specials) if template == CHATML else read_template(template)
    try:
        _, (answer, _), _ = Template(text, vocabulary.specials).turns(TRIAL)
    except ValueError as error:
        raise UserError(f"{TEMPLATE}={template}: {printable(str(error))}: choose another") from error
    return replace(vocabulary, template=text, end=next(filter(answer.endswith, vocabulary.specials), ""))


def read_template(url: str) -> str:
    """The template at a URL, with the tokens that it names: a file, or a folder or the hub's model with one.

    Of several with names, the one named default. Raises UserError if none is there, or it is damaged.
    """
    files = ModelFolder(url, TEMPLATE, [JINJA, CONFIG]).files(FILE_LIMIT)
    try:
        texts = {name or JINJA: raw.decode("utf-8-sig") for name, raw in files.items()}
        fields = json.loads(texts.get(CONFIG, "{}"))
        text = texts.get(JINJA) or fields.get("chat_template")
        if text is None:
            cure = f"give chatml, plain, a template's file, or a folder with {JINJA} or a chat_template in {CONFIG}"
            raise UserError(f"{TEMPLATE}={url}: no chat_template is there: {cure}")
        if not isinstance(text, str):
            named = text if isinstance(text, dict) else {each["name"]: each["template"] for each in text}
            text = named["default"]
        lines = list[str]()
        for key, token in fields.items():
            if key.endswith("_token") and token and key in text:
                value = token if isinstance(token, str) else token["content"]
                # The template's own first line feed would be taken as the end of the last of these.
                lines.append(f"{{% set {key} = {json.dumps(value, ensure_ascii=False)} %}}\n")
        return "".join([*lines, text])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = f"damaged, or of several with names none is called default ({type(error).__name__}: {error})"
        raise UserError(f"{TEMPLATE}={url}: the chat_template is {why}: copy it again") from error
