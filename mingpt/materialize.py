"""`mingpt materialize RUN@N OUT`: write the snapshot of a step that the run has not stored, or no longer has."""

import argparse
from typing import NoReturn

from mingpt.command import run
from mingpt.replay import add_places, plain_parser

DESCRIPTION = (
    "Compute the state after step N of a run from the nearest snapshot before it, and write it to OUT as an ordinary "
    "snapshot, for generate, evaluate, export or train run.dir=OUT. Nothing is written if a step on the way has other "
    "bits than the run recorded."
)


def parser() -> argparse.ArgumentParser:
    parser = plain_parser("mingpt.materialize", DESCRIPTION)
    parser.add_argument("point", metavar="RUN@N", help="a run's directory (any fsspec URL), @ and the step")
    parser.add_argument("out", metavar="OUT", help="where to: another run's directory, any fsspec URL")
    add_places(parser)
    return parser


def main() -> NoReturn:
    run("mingpt.commands.materialize")


if __name__ == "__main__":
    main()
