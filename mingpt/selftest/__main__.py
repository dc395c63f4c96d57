"""`mingpt selftest`: does this machine compute right, and equal to itself under load?

Repeats known steps with all cores or GPUs busy and compares their bits, then trains a small model with 1, 2, 3 and all
processes, stops it, kills one, hangs one, and compares digests. It needs no data and leaves nothing behind.
"""

from pathlib import Path
from typing import NoReturn

from mingpt.command import program, run
from mingpt.config.commandline import Parser

EPILOG = "Exit codes: 0 all checks passed; 1 one failed: don't train here; 64 an option is wrong"


def parser() -> Parser:
    parser = Parser(prog=program("mingpt.selftest"), description=__doc__, epilog=EPILOG)
    parser.add_argument("--seconds", type=float, default=20, help="to repeat known steps, all cores busy (default: 20)")
    parser.add_argument("--quick", action="store_true", help="only that: no runs are started")
    parser.add_argument("--compile", action="store_true", help="compiled steps, too (a C compiler; a minute on a CPU)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPUs, where there are some")
    parser.add_argument("--json", action="store_true", help="print all that was found as JSON")
    parser.add_argument("--out", type=Path, help="write this machine's row for the table of known ones to a file")
    return parser


def main() -> NoReturn:
    run("mingpt.selftest.command")


if __name__ == "__main__":
    main()
