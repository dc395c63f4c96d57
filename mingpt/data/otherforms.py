"""Conversations in the forms of others, which are not read, but known: what makes them ours."""

from collections.abc import Mapping
from typing import Any

JQ = {  # what makes conversations of other forms
    "conversations": """{messages: [.conversations[] | {role: ({human: "user", gpt: "assistant"}[.from] // .from), """
    """content: .value}]}""",
    "instruction": """{prompt: (.instruction + "\\n" + (.input // "") | rtrimstr("\\n")), answer: .output}""",
}


def other_form(line: Mapping[str, Any]) -> str:
    """The key by which a conversation of ShareGPT's or Alpaca's form is known; "" for others."""
    return next((key for key in JQ if key in line), "")


def how_to_map(line: Mapping[str, Any]) -> str:
    """What makes ours of a file of such lines; "" if nothing is known of them."""
    key = other_form(line)
    return f": jq -c '{JQ[key]}' makes ours of all such lines" if key else ""
