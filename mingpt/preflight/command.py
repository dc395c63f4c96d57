"""`mingpt preflight [options] [overrides]`: check all nodes before training; run it once on each.

It takes the options of `mingpt launch`, and reads the platform's variables as that does. All that it leaves behind is
an empty run.dir. Exit codes: 0 fine, or warnings only; 64 something to fix first; 70 a node can't be reached.
"""

import math
import os

from mingpt.config import compose
from mingpt.config.commandline import Parser
from mingpt.console import complain, say
from mingpt.errors import USER_ERROR, UserError
from mingpt.launch.torchrun import Torchrun, options_parser, parse
from mingpt.preflight.inspection import Inspection

EPILOG = "Exit codes: 0 fine, or warnings only; 64 something to fix first; 70 a node can't be reached"


def parser() -> Parser:
    parser = options_parser("mingpt.preflight", "Check all nodes before training; run it once on each.", EPILOG)
    parser.add_argument("--seconds", type=float, default=60, help="longest wait for the other nodes (default: 60)")
    parser.add_argument("--json", action="store_true", help="print all that was found as JSON")
    return parser


def main(arguments: list[str]) -> int:
    options = parse(arguments, parser())
    chosen = options.nproc_per_node is not None
    options.nproc_per_node = options.nproc_per_node or "1"  # the default asks torch, which takes seconds to import
    try:
        if not 0 <= options.seconds < math.inf:
            raise UserError(f"--seconds {options.seconds:g}: give a number, 0 or more")
        node = Torchrun.compose(options, os.environ)
        config = compose.configure(node.overrides, node.fewest_processes)
    except UserError as error:
        complain(f"error: {error}")
        return USER_ERROR
    assert config is not None  # None is for --help, which the parser has answered
    report = Inspection(node, config, node.processes if chosen else None, options.seconds).run()
    say(report.as_json() if options.json else report.as_text())
    return report.code
