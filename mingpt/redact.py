"""What may be shown and stored: a config or a text without the secrets in it, and nothing that commands a terminal."""

import os
import re
from typing import Any

BLANK = "***"
SECRET_NAME = r"token|password|passwd|secret|connection_?string|api_?key|account_?key|access_?key|[a-z0-9]_key"
# As the last words of a key or a variable: `token`, `hf_token`, `AccountKey`; not `tokens`, `tokenizer`, `n_key`.
NAME = re.compile(rf"(?:^|.*[._\-])(?:{SECRET_NAME}|key|credentials?)$", re.I)
# Inside a text: `data.token=…`, `AccountKey=…`, `'token': '…'`. A bare `key=` is how we write of any key.
NAMED = re.compile(rf"(?i)((?:{SECRET_NAME}|credentials?|[\w]\.key|--key)(?:=|['\"]\s*:\s*))(['\"]?)[^\s'\"]+")
KNOWN = re.compile(r"\b(?:hf_|gh[oprsu]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA|ASIA)[A-Za-z0-9_\-]{6,}")
SHORTEST = 8  # characters of a secret in the environment that is looked for in texts: shorter ones are in many words
# Escape codes and all other control characters but tab and line end, and what turns the direction of a line.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def without_secrets(value: Any) -> Any:
    """A copy of a plain config, or a text, without passwords, signatures and tokens.

    What is one: all but the place in a URL, the value of a key that is named like one, and what the environment holds
    under such a name.
    """
    if isinstance(value, dict):
        return {without_secrets(k): BLANK if is_secret(k, v) else without_secrets(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(v) for v in value]
    return _text(value) if isinstance(value, str) else value


def is_secret(key: object, value: object) -> bool:
    """Whether a key's value is one by its name. A number is one only if the name says password or secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(key))
    if value is None or isinstance(value, bool) or value == "" or not NAME.match(words):
        return False
    return not isinstance(value, (int, float)) or re.search("passw|secret", words, re.I) is not None


def _text(text: str) -> str:
    for secret in _of_environment():
        text = text.replace(secret, BLANK)
    if "://" in text:
        # A password may hold a `/`, and then the address ends at the last `@`.
        text = re.sub(r"://[^/\s'\"]*@|://[^/:@\s'\"]+:[^\s'\"]*@", f"://{BLANK}@", text)
        text = re.sub(r"(://[^?#\n]*[?#]).*", rf"\1{BLANK}", text)
    return KNOWN.sub(BLANK, NAMED.sub(rf"\1\2{BLANK}", text))


def _of_environment() -> list[str]:
    """The longest first: one may hold another."""
    values = {v for k, v in os.environ.items() if len(v) >= SHORTEST and NAME.match(k)}
    return sorted(values, key=len, reverse=True)


def escaped(text: str) -> str:
    """A text of ours on its way to a terminal or a log: what somebody has smuggled into it commands nothing."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def printable(text: str) -> str:
    """Somebody else's text as a part of a line: it begins no other line either."""
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")
