"""`mingpt receipt RUN`: write down what a run was computed from, by whom, and with which bits; and check that.

The receipt is one JSON file on standard output: a chain of hashes over code, configs, data, fingerprints, attempts,
traces, and the digests of kept snapshots. --verify FILE checks the chain, compares it with the run, and computes
--sample intervals again, as `mingpt audit` does. The run is only read. Exit codes: 0 all is right; 1 something is
wrong; 64 as for `mingpt audit`.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from mingpt.command import Unfit, command, program
from mingpt.commands.audit import as_text, audited, conclude
from mingpt.console import complain, say
from mingpt.errors import FINISHED, UserError
from mingpt.storage import place


def parser() -> argparse.ArgumentParser:
    from mingpt.config.commandline import Parser
    from mingpt.replay import add_places

    parser = Parser(prog=program("mingpt.commands.receipt"), description=__doc__, allow_abbrev=False)
    parser.add_argument("url", metavar="RUN", help="a run's directory: a path, or any fsspec URL")
    add_places(parser)
    parser.add_argument("--verify", type=Path, metavar="FILE", help="check this receipt of the run")
    parser.add_argument("--sample", type=int, default=3, metavar="K", help="with --verify: intervals (default: 3)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of --sample (default: 0)")
    return parser


@command()
def receipt_command(arguments: list[str]) -> int:
    options = parser().parse_intermixed_args(arguments)
    if options.sample < 0:
        raise UserError(f"--sample {options.sample}: give how many intervals; 0 computes none again")
    from mingpt.report.receipt import encode, entries
    from mingpt.train.past import Past

    past = Past(options.url, options.attempt, options.snapshots)
    if options.verify is None:
        say(encode(entries(past)))
        return FINISHED
    return _verify(options)


def _verify(options: argparse.Namespace) -> int:
    from mingpt.report.receipt import LARGEST, compare, decode
    from mingpt.train.past import Past

    with place("--verify", str(options.verify)), options.verify.open("rb") as file:
        raw = file.read(LARGEST)
    told = decode(raw)
    wrong, notes = compare(told, Past(options.url, options.attempt, options.snapshots))
    for note in notes:
        complain(note)
    if wrong:
        raise Unfit("\n".join(["the run is not as the receipt says:", *wrong]))
    say(f"the chain holds, and its {len(told)} entries are as in the run")
    if not options.sample:
        return FINISHED
    options.first = None
    options.last = max(entry["step"] for entry in told if entry["what"] == "snapshot")
    found = []
    with audited(options) as parts:
        for interval in parts:
            found.append(interval)
            say(as_text(interval))
    return conclude(found, parts.notes)


def main() -> NoReturn:
    sys.exit(receipt_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
