"""Removes secrets from configs and texts.

This is the business of sinks, the few places where something leaves the process: console.py, events that are published,
torchrun's error file, a manifest's config, a report's page. What makes a message does not ask what is secret in it:
whoever forgot it once would leak.
"""

import os
import re
from typing import Any

BLANK = "***"
SECRET_NAME = r"token|password|passwd|secret|connection_?string|api_?key|account_?key|access_?key|[a-z0-9]_key|notify"
# (`notify`: the address of a webhook is a secret as a whole.)
# At the end of a key's or variable's name: `token`, `hf_token`, `AccountKey`; not `tokens`, `tokenizer`, `n_key`.
NAME = re.compile(rf"(?:^|.*[._\-])(?:{SECRET_NAME}|key|credentials?)$", re.I)
# Inside a text: `data.token=…`, `AccountKey=…`, `'token': '…'`, `{token: …}`. Not a bare `key=` or `token: …`, which
# our messages use for any key, and not `health.notify=null`: no value is no secret.
NAMED_KEY = rf"{SECRET_NAME}|credentials?|[\w]\.key|--key|(?<=['\"])key(?=\\*['\"])|(?-i:[a-z0-9]Key)"
# A list or a dict, to the bracket that closes it: brackets in its texts count for nothing, and NESTED may be in it.
QUOTED = r"'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\""
NESTED = "(?!)"
for _ in range(4):  # levels, outwards
    NESTED = rf"[\[{{(](?:{QUOTED}|{NESTED}|[^\[\](){{}}'\"\n])*[\]}})]"
WORD = r"[^\s'\"]%s?(?=[:;,.)\]}]*(?:[\s'\"]|$))"  # to its end, without what belongs to the sentence
NAMED_VALUE = (
    r"('\"'\"'|\\+['\"])[^'\"]+",  # quotes that were quoted: by a shell, or with a backslash by Python and JSON
    r"(')(?:\\.|[^'\\])+",
    r'(")(?:\\.|[^"\\])+',
    rf"{NESTED}{WORD % '*'}",
    r"[\[{(].*[\]})]",  # one that nothing closes, or with more levels: to the line's last bracket
    WORD % "+",
)
NAMED = re.compile(rf"(?i)((?:{NAMED_KEY})(?:=|\\*['\"]\s*:\s*))(?!(?:null|None)\b)(?:{'|'.join(NAMED_VALUE)})")
BRACES = re.compile(r"\{.*\}")
IN_BRACES = re.compile(rf"(?i)((?:{SECRET_NAME}|credentials?|key):\s)(['\"])?(?(2)[^'\"]+|[^\s'\",}}]+)")
KNOWN = re.compile(r"\b(?:hf_|gh[oprsu]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA|ASIA)[A-Za-z0-9_\-]{6,}")
# A URL's user and password, up to the last `@`, since a password may contain a `/`.
USER = re.compile(r"://[^/\s'\"]*@|://[^/:@\s'\"]+:[^\s'\"]*@")
# The query and the fragment of a URL that ends its text, and of one inside of a sentence: there it ends at a space, and
# a closing bracket, quote or comma before that belongs to the sentence.
QUERY = re.compile(r"(://[^?#\n]*[?#]).*")
QUERY_IN_LINE = re.compile(r"(://[^?#\s]*[?#])\S*?(?=[:;,.)\]}'\"]*(?:\s|$))")
# Behind a space in a URL's path, which ends the match before.
PARAMETER = re.compile(r"([?&][\w.~-]+=)[^\s&'\"]+")
SHORTEST = 8  # characters of a secret of the environment; shorter ones would match inside of ordinary words


def without_secrets(value: Any, environment: bool = True) -> Any:
    """A copy of a plain config, or of one of its values, without passwords, signatures and tokens.

    Removed are a URL's user, password, query and fragment, the values of keys with a name like NAME, and the values of
    environment variables with such a name. environment: False for what must not depend on this process's variables.
    """
    return _copied(value, _of_environment() if environment else [], QUERY, by_name=True)


def redacted(value: Any, environment: bool = True) -> Any:
    """A copy of what people or programs read: a text, or lists and dicts with texts in them.

    A URL may stand anywhere in a text, and what follows it stays. A dict's values stay whatever their names are, since
    `attention.key` names a tensor here: texts in which a name stands beside its value lose that value.
    """
    return _copied(value, _of_environment() if environment else [], QUERY_IN_LINE, by_name=False)


def is_secret(key: object, value: object) -> bool:
    """Whether a key's name marks its value as a secret; a number only if the name has password or secret in it."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(key))
    if value is None or isinstance(value, bool) or value == "" or not NAME.match(words):
        return False
    return not isinstance(value, (int, float)) or re.search("passw|secret", words, re.I) is not None


def _copied(value: Any, secrets: list[str], query: re.Pattern[str], by_name: bool) -> Any:
    if isinstance(value, dict):
        return {
            _copied(key, secrets, query, by_name): BLANK
            if by_name and is_secret(key, inner)
            else _copied(inner, secrets, query, by_name)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_copied(inner, secrets, query, by_name) for inner in value]
    return _text(value, secrets, query) if isinstance(value, str) else value


def _text(text: str, secrets: list[str], query: re.Pattern[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, BLANK)
    if "://" in text:
        text = USER.sub(f"://{BLANK}@", text)
        text = query.sub(rf"\1{BLANK}", text)
        text = PARAMETER.sub(rf"\1{BLANK}", text)
    text = NAMED.sub(rf"\1\2\3\4{BLANK}", text)
    text = BRACES.sub(lambda braces: IN_BRACES.sub(rf"\1\2{BLANK}", braces[0]), text)
    return KNOWN.sub(BLANK, text)


def _of_environment() -> list[str]:
    """The environment's secrets, the longest first, since one may contain another."""
    values = {v for k, v in os.environ.items() if len(v) >= SHORTEST and NAME.match(k)}
    return sorted(values, key=len, reverse=True)
