"""What the pages name is there."""

import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from mingpt.cli import VERBS
from mingpt.config.groups import groups
from mingpt.config.keys import KINDS, keys, named
from paths_kit import ROOT

# The log and the changelog tell of what was.
PAGES = [
    ROOT / "README.md",
    ROOT / "mingpt/README.md",
    *sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs/log.md"}),
]
BLOCK = re.compile(r"^```.*?^```", re.M | re.S)
KEY = re.compile(r"(?<![\w.$/{-])((?:[a-z]+)(?:\.[a-z_]+)+)=")
CHOICE = re.compile(r"(?<![\w./-])([a-z]+(?:/[a-z]+)?)=([A-Za-z][\w.-]*)(?=[\s`,'\"]|$)")
THEIRS = {"mine", "countdown", "model.hidden"}  # names that the pages' examples give to a user's own
OPTION = re.compile(r"(?<!\S)--[a-z][a-z-]+")


def code(page: Path) -> list[str]:
    text = page.read_text()
    return BLOCK.findall(text) + re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_keys_and_choices_that_a_page_shows_are_there(page: Path) -> None:
    known = {
        *keys(),
        *(f"{section}.{key}" for section, kinds in KINDS.items() for kind in kinds.values() for key in named(kind)),
    }
    there = groups()
    sections = {key.partition(".")[0] for key in known if "." in key}
    shown = {key for text in code(page) for key in KEY.findall(text) if key.partition(".")[0] in sections}
    strange = {key for key in shown - known - THEIRS if not key.startswith("data.mix.")}  # data.mix.NAME.key
    wrong = {
        f"{group}={choice}"
        for text in code(page)
        for group, choice in CHOICE.findall(text)
        if group in there and choice not in {*there[group], *THEIRS}
    }
    assert (strange, wrong) == (set(), set())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_verbs_and_options_that_a_page_shows_are_there(page: Path) -> None:
    wrong = set()
    for line in "\n".join(code(page)).replace("\\\n", " ").splitlines():
        for verb, rest in re.findall(
            r"(?:^|[\s/(])mingpt ([a-z]+(?:-[a-z]+)*)\b(?!/)([^|;&#]*)", re.sub('"[^"]*"', "", line)
        ):
            if verb not in VERBS:
                wrong.add(verb)
            else:
                wrong |= {f"{verb} {option}" for option in OPTION.findall(rest) if option not in help_of(verb)}
    assert wrong == set()


@cache
def help_of(verb: str) -> str:
    module = import_module(VERBS[verb].options or VERBS[verb].module)
    parser = module.parser()
    subparsers = [a.choices for a in parser._actions if isinstance(a.choices, dict)]
    parsers = [parser, *(inner for choices in subparsers for inner in choices.values())]
    return " ".join(p.format_help() for p in parsers) + " --multirun"
