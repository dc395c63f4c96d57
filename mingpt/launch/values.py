"""Checks the values of torchrun's options. Each check adds to a list what is wrong, so that all is told at once."""

import ipaddress
import re
from contextlib import suppress

from mingpt.config.section import LARGEST

# Settings of the rendezvous that torch reads as numbers. It takes any others, and nobody reads those.
NUMBERS = (
    *("timeout", "join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "read_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt"),
)
YES_OR_NO = ("1", "true", "t", "yes", "y", "0", "false", "f", "no", "n")  # as torch reads them


class Names(dict[str, str]):
    """What an option is called in messages: the variable that has set it, else `--its-name`."""

    def __missing__(self, name: str) -> str:
        return f"--{name.replace('_', '-')}"

    def missing(self, name: str) -> str:
        """What would set it: a variable if one has set the number of nodes."""
        return f"PET_{name.upper()}" if "nnodes" in self else self[name]


def nodes(option: str, text: str, problems: list[str]) -> tuple[int, int]:
    """The least and the largest number of nodes; 0 if that is wrong."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least = most = 0
    if match:
        least = int(match[1])
        most = int(match[2] or match[1])
    if not 1 <= least <= most:
        problems.append(f"{option}={text}: give a number of nodes, or MIN:MAX")
        return 0, 0
    return least, most


def number(
    option: str, text: str | None, least: int, problems: list[str], most: int | None = None, sign: str = "="
) -> int | None:
    """The value of an option, or None if it is missing or wrong. sign: between option and value."""
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        problems.append(f"{option}{sign}{text}: give a number from {least}" + ("" if most is None else f" to {most}"))
        return None
    return int(text)


def host(text: str) -> str:
    """The name or the address, without the brackets of IPv6; "" if it is neither, as torch sees it."""
    bare = text[1:-1] if text[:1] + text[-1:] == "[]" else text
    if ":" not in text:
        return bare if re.fullmatch(r"[\w.-]+", text) else ""
    with suppress(ValueError):
        return bare if ipaddress.IPv6Address(bare).scope_id is None else ""
    return ""


def endpoint(option: str, text: str, problems: list[str]) -> tuple[str, str | None]:
    """The host and the port of HOST:PORT; no host if that is wrong, and None for a port that is left out."""
    match = re.fullmatch(r"(.*?)(?::(\d+))?", text)
    name = host(match[1]) if match else ""
    if not match or not name:
        problems.append(f"{option}={text}: give HOST:PORT")
        return "", None
    return name, match[2]


def settings(option: str, text: str | None, most: int, problems: list[str]) -> str:
    """The settings of the rendezvous, with a leading comma; "" for none. most: number of nodes, 0 if unknown."""
    if not text:
        return ""
    for part in text.split(","):
        key, _, value = part.partition("=")
        key, value = key.strip(), value.strip()
        if not key or not value:
            problems.append(f"{option}: '{part}': give KEY=VALUE, several with commas between")
        elif key in NUMBERS:
            number(f"{option}: {key}", value, 1, problems, LARGEST)
        elif key == "rank":
            number(f"{option}: {key}", value, 0, problems, most - 1 if most else None)
        elif key == "is_host" and value.lower() not in YES_OR_NO:
            problems.append(f"{option}: {key}={value}: give true or false")
    # Behind ours, so that the user's settings have the last word.
    return f",{text}"
