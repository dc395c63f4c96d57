"""`mingpt evaluate URL [data=… data.path=…]`: evaluate a snapshot's model on a validation split.

The data are those of the snapshot's config, changed by Hydra's overrides, and encoded in the snapshot's vocabulary.
With --tasks it answers tasks of lm-eval in place of that.
Runs alone or as one of torchrun's or srun's processes, with the same figures.

Exit codes: 0 done; 64 an error that the user must fix; 70 crashed, try again.
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
    from mingpt.config.commandline import Parser, add_options

    parser = Parser(prog=program("mingpt.evaluate"), description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("url", metavar="URL", help="RUN or RUN@STEP (or a folder of snapshots, or of one)")
    parser.add_argument(
        "overrides", metavar="OVERRIDE", nargs="*", help="data=…, data.path=…, world.device=…: as train"
    )
    add_options(parser)
    parser.add_argument("--step", type=int, help="the snapshot of this step (default: the newest)")
    parser.add_argument("--json", action="store_true", help="for programs")
    tasks = parser.add_argument_group("tasks of lm-eval, in place of the data (extra `eval`)")
    tasks.add_argument("--tasks", metavar="NAMES", help="such as hellaswag,arc_easy; groups and patterns, too")
    tasks.add_argument("--num-fewshot", metavar="N", type=number, help="examples before each question (the task's own)")
    tasks.add_argument("--limit", metavar="N", type=number, help="take the first N documents of each task (all)")
    tasks.add_argument("--batch-size", metavar="N", type=number, help="rows at a time (batch.micro_size)")
    tasks.add_argument("--include-path", metavar="DIR", help="a folder with tasks of your own; their code runs")
    return parser


def number(text: str) -> int:
    """The value of an option. Raises ValueError, which argparse tells."""
    if (value := int(text)) < 0:
        raise ValueError
    return value


def main() -> NoReturn:
    entry.run("mingpt.commands.evaluate", "command", Lifetime(trains=False), worker=True)


if __name__ == "__main__":
    main()
