"""`mingpt replay RUN@N`: compute a past step of a run again, and look at it, or store its state.

Exit codes: 0 the bits are those that the run recorded (or it recorded none); 1 they are not; 64 an error that the user
must fix.
"""

import argparse
from typing import NoReturn

from mingpt.command import program, run

DESCRIPTION = (
    "Compute step N of a run again, from the nearest snapshot before it, and say whether the bits are those that the "
    "run recorded. Then: loss by sample, gradient and update by layer; or, with --out, the snapshot of that step. The "
    "run is only read. One process is enough, whatever the run had."
)


def parser() -> argparse.ArgumentParser:
    from mingpt.config.commandline import Parser

    parser = Parser(prog=program("mingpt.replay"), description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("url", metavar="RUN@N", help="a run's directory (any fsspec URL), @ and the step, from 1")
    parser.add_argument("--step", type=int, metavar="N", help="the step, if RUN stands alone")
    parser.add_argument("--out", metavar="DIR", help="write the state after it to DIR, as that run's snapshot")
    add_places(parser)
    parser.add_argument("--drop", metavar="P,P", default="", help="and again without these positions of the batch")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="and again with this setting")
    parser.add_argument("--then", type=int, default=0, metavar="K", help="and the K steps that would have followed")
    parser.add_argument("--samples", type=int, default=3, metavar="K", help="show the K worst and best (default: 3)")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


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
