"""`mingpt evaluate URL [data=… data.path=…]`: how good the model of a snapshot is on a validation split.

The data is that of the snapshot's config, with Hydra's overrides over it, told in the snapshot's vocabulary. Alone, or
as one of torchrun's or srun's processes: the figures are the same.

Exit codes: 0 done; 64 a mistake to fix; 70 a crash, try again.
"""

import argparse
from typing import NoReturn

from mingpt.command import program
from mingpt.world import entry
from mingpt.world.lifetime import Lifetime

DESCRIPTION = (
    "How good a snapshot's model is: loss, perplexity, bits per byte of text, accuracy where data asks questions."
)


def parser() -> argparse.ArgumentParser:
    from mingpt.config.compose import Parser

    parser = Parser(prog=program("mingpt.evaluate"), description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("url", metavar="URL", help="a run's directory, its snapshots folder, or one step's folder")
    parser.add_argument(
        "overrides", metavar="OVERRIDE", nargs="*", help="data=…, data.path=…, world.device=…: as train"
    )
    parser.add_argument("--step", type=int, help="the snapshot of this step (default: the newest)")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def load() -> entry.Program:
    from mingpt.commands.evaluate import command

    return command


def main() -> NoReturn:
    entry.run(load, Lifetime(), worker=True)


if __name__ == "__main__":
    main()
