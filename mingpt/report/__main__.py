"""`mingpt report RUN …`: one HTML page of what one run or several have done."""

import argparse
from pathlib import Path
from typing import NoReturn

from mingpt.command import program, run


def parser() -> argparse.ArgumentParser:
    from mingpt.config.commandline import Parser

    parser = Parser(prog=program("mingpt.report"), description=__doc__)
    parser.add_argument(
        "urls",
        metavar="RUN",
        nargs="+",
        help="a run's directory, its snapshots folder, or a folder of runs; any URL",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where the page goes (default: RUN/report.html; else ./report.html)"
    )
    return parser


def main() -> NoReturn:
    run("mingpt.commands.report")


if __name__ == "__main__":
    main()
