"""What the pages name is there."""

import re
from functools import cache
from pathlib import Path

import pytest

from mingpt.cli.parsers import VERBS, parser_of
from mingpt.compose.groups import groups
from mingpt.config.keys import KINDS, keys, named
from tests.kits.paths_kit import ROOT

# DECISIONS.md and the changelog tell of what was.
PAGES = [
    ROOT / "README.md",
    ROOT / "mingpt/README.md",
    *sorted({*(ROOT / "docs").glob("*.md")}),
]
BLOCK = re.compile(r"^```.*?^```", re.M | re.S)
KEY = re.compile(r"(?<![\w.$/{-])((?:[a-z]+)(?:\.[a-z_]+)+)=")
CHOICE = re.compile(r"(?<![\w./-])([a-z]+(?:/[a-z]+)?)=([A-Za-z][\w.-]*)(?=[\s`,'\"]|$)")
COMMAND = re.compile(r"(?:^|[\s/(])mingpt ([a-z]+(?:-[a-z]+)*)\b(?!/)([^|;&#]*)")
OPTION = re.compile(r"(?<!\S)--[a-z][a-z-]+")
THEIRS = {
    "mine",
    "countdown",
    "data.count",
    "data.digits",
    "data.validation",
    "model.hidden",
    "optimizer.betas",
    "schedule.cooldown",
}  # names that the pages' examples give to a user's own


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_keys_choices_verbs_and_options_that_a_page_shows_are_there(page: Path) -> None:
    text = page.read_text()
    code = "\n".join(BLOCK.findall(text) + re.findall(r"`([^`\n]+)`", BLOCK.sub("", text)))
    known = {
        *keys(),
        *(f"{section}.{key}" for section in KINDS for kind in KINDS[section].values() for key in named(kind)),
    }
    sections = {key.partition(".")[0] for key in known if "." in key}
    wrong = {key for key in {*KEY.findall(code)} - known - THEIRS if key.partition(".")[0] in sections}
    for group, choice in CHOICE.findall(code):
        if choice not in {*groups().get(group, [choice]), *THEIRS}:
            wrong.add(f"{group}={choice}")
    for line in code.replace("\\\n", " ").splitlines():
        for verb, rest in COMMAND.findall(re.sub('"[^"]*"', "", line)):
            wrong |= {f"{verb} {option}" for option in ("--help", *OPTION.findall(rest)) if option not in help_of(verb)}
    assert {name for name in wrong if not name.startswith("data.mix.")} == set()  # data.mix.NAME.key


@cache
def help_of(verb: str) -> str:
    """Every option of a verb; nothing of one that is not there."""
    if verb not in VERBS:
        return ""
    parser = parser_of(verb)
    inner = (p for a in parser._actions if isinstance(a.choices, dict) for p in a.choices.values())
    return " ".join(p.format_help() for p in (parser, *inner)) + " --multirun"
