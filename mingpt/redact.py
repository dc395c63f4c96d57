"""Removes secrets from configs and texts before they are printed or stored, and escapes control characters."""

import os
import re
from collections.abc import Iterable
from typing import Any

BLANK = "***"
SECRET_NAME = r"token|password|passwd|secret|connection_?string|api_?key|account_?key|access_?key|[a-z0-9]_key|notify"
# (`notify`: the address of a webhook is a secret as a whole.)
# At the end of a key's or variable's name: `token`, `hf_token`, `AccountKey`; not `tokens`, `tokenizer`, `n_key`.
NAME = re.compile(rf"(?:^|.*[._\-])(?:{SECRET_NAME}|key|credentials?)$", re.I)
# Inside a text: `data.token=…`, `AccountKey=…`, `'token': '…'`, `{token: …}`; up to the next quote if the value is in
# quotes. Not a bare `key=` or `token: …`, which our messages use for any key.
NAMED = re.compile(
    rf"(?i)((?:{SECRET_NAME}|credentials?|[\w]\.key|--key)(?:=|['\"]\s*:\s*))(['\"])?(?(2)[^'\"]+|[^\s'\"]+)"
)
IN_BRACES = re.compile(rf"(?i)((?:{SECRET_NAME}|credentials?|key):\s)(['\"])?(?(2)[^'\"]+|[^\s'\",}}]+)(?=.*\}})")
KNOWN = re.compile(r"\b(?:hf_|gh[oprsu]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA|ASIA)[A-Za-z0-9_\-]{6,}")
SHORTEST = 8  # characters of a secret of the environment; shorter ones would match inside of ordinary words
# Control characters (escape codes begin with one) except tab and line feed; line separators; direction marks.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def without_secrets(value: Any) -> Any:
    """A copy of a plain config or of a text without passwords, signatures and tokens.

    Removed are a URL's user, password, query and fragment, the values of keys with a name like NAME, and the values of
    environment variables with such a name.
    """
    if isinstance(value, dict):
        return {without_secrets(k): BLANK if is_secret(k, v) else without_secrets(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(v) for v in value]
    return _text(value) if isinstance(value, str) else value


def is_secret(key: object, value: object) -> bool:
    """Whether a key's name marks its value as a secret; a number only if the name has password or secret in it."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(key))
    if value is None or isinstance(value, bool) or value == "" or not NAME.match(words):
        return False
    return not isinstance(value, (int, float)) or re.search("passw|secret", words, re.I) is not None


def _text(text: str) -> str:
    for secret in _of_environment():
        text = text.replace(secret, BLANK)
    if "://" in text:
        # A password may contain a `/`, so everything up to the last `@` goes.
        text = re.sub(r"://[^/\s'\"]*@|://[^/:@\s'\"]+:[^\s'\"]*@", f"://{BLANK}@", text)
        text = re.sub(r"(://[^?#\n]*[?#]).*", rf"\1{BLANK}", text)
    for named in (NAMED, IN_BRACES):
        text = named.sub(rf"\1\2{BLANK}", text)
    return KNOWN.sub(BLANK, text)


def _of_environment() -> list[str]:
    """The environment's secrets, the longest first, since one may contain another."""
    values = {v for k, v in os.environ.items() if len(v) >= SHORTEST and NAME.match(k)}
    return sorted(values, key=len, reverse=True)


def escaped(text: str) -> str:
    """The text with control characters escaped, so that foreign text in it can't control a terminal."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def as_lines(texts: Iterable[str]) -> str:
    """A page for a terminal or a log of texts that may be foreign: each stays one line."""
    return "\n".join(map(printable, texts))


def printable(text: str) -> str:
    """Foreign text as part of one line: control characters, line feeds and tabs are escaped."""
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")
