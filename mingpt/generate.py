"""`mingpt generate URL`: continue texts with a snapshot's model."""

import argparse
from typing import NoReturn

from mingpt.command import program, run


def parser() -> argparse.ArgumentParser:
    from mingpt.config.commandline import Parser

    parser = Parser(prog=program("mingpt.generate"), description=__doc__)
    parser.add_argument("url", metavar="URL", help="RUN or RUN@STEP (or a folder of snapshots, or of one)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to continue (default: a new line; of plain numbers: 0)")
    source.add_argument("--file", metavar="FILE", help="continue what is in this file or URL; -: standard input")
    parser.add_argument("--lines", action="store_true", help="each line of the file is a prompt of its own")
    parser.add_argument("--samples", type=int, default=1, help="texts for each prompt (default: 1)")
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to add (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=int, help="choose among the k likeliest tokens (default: among all)")
    parser.add_argument("--top-p", type=float, help="and among the likeliest that have this share of the chance")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same texts (default: 1)")
    parser.add_argument("--batch", type=int, default=16, help="texts at a time; fewer need less memory (default: 16)")
    parser.add_argument("--speed", action="store_true", help="say on stderr how many tokens a second were drawn")
    parser.add_argument("--step", type=int, help="the snapshot of this step (default: the newest)")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU where there is one (default)"
    )
    return parser


def main() -> NoReturn:
    run("mingpt.commands.generate")


if __name__ == "__main__":
    main()
