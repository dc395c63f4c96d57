"""`mingpt replay RUN --step N`: compute a past step of a run again, and look at it.

Exit codes: 0 the bits are those that the run recorded (or it recorded none); 1 they are not; 64 an error that the user
must fix.
"""

import argparse
from pathlib import Path
from typing import NoReturn

from mingpt.command import program, run

DESCRIPTION = (
    "Compute step N of a run again, from the nearest snapshot before it, and say whether the bits are those that the "
    "run recorded. Then: loss by sample, gradient and update by layer. The run is only read. One process is enough, "
    "whatever the run had."
)


def parser() -> argparse.ArgumentParser:
    parser = plain_parser("mingpt.replay", DESCRIPTION)
    parser.add_argument("url", metavar="RUN", help="a run's directory: a path, or any fsspec URL")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step to look at, counted from 1")
    add_places(parser)
    parser.add_argument("--drop", metavar="P,P", default="", help="and again without these positions of the batch")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="and again with this setting")
    parser.add_argument("--then", type=int, default=0, metavar="K", help="and the K steps that would have followed")
    parser.add_argument("--samples", type=int, default=3, metavar="K", help="show the K worst and best (default: 3)")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page, too")
    return parser


def plain_parser(module: str, description: str) -> argparse.ArgumentParser:
    from mingpt.config.commandline import Parser

    return Parser(prog=program(module), description=description, allow_abbrev=False)


def add_places(parser: argparse.ArgumentParser) -> None:
    """Where the run's things lie, and which of its attempts is followed."""
    parser.add_argument(
        "overrides", metavar="OVERRIDE", nargs="*", help="what is so on this machine: data.path=…, world.device=…"
    )
    parser.add_argument("--attempt", type=int, metavar="A", help="as this attempt computed it (default: the newest)")
    parser.add_argument("--snapshots", metavar="URL", help="snapshot.dir, if the run has set one")


def main() -> NoReturn:
    run("mingpt.commands.replay")


if __name__ == "__main__":
    main()
