"""What may be shown and stored: a config or a text without the secrets in it."""

import re
from typing import Any


def without_secrets(value: Any) -> Any:
    """A copy of a plain config in which URLs carry no user, password, signature or token."""
    if isinstance(value, dict):
        return {k: without_secrets(v) for k, v in value.items()}
    if isinstance(value, str) and "://" in value:
        return re.sub(r"\?.*", "?***", re.sub(r"://[^/]*@", "://***@", value))
    return value
