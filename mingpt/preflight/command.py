"""`mingpt preflight [options] [overrides]`: look at all nodes before training; run it once on each.

It takes the options of mingpt.launch, and as that one reads nodes and addresses from the platform, if there is one. It
leaves nothing behind but an empty run.dir. Exit codes: 0 fine, or warnings only; 64 something to fix first; 70 a node
can't be reached.
"""

import math
import os

from mingpt.config import compose
from mingpt.config.compose import Parser
from mingpt.console import complain, say
from mingpt.errors import USER_ERROR, UserError
from mingpt.launch.torchrun import Torchrun, options_parser, parse
from mingpt.preflight.inspection import inspect

EPILOG = "Exit codes: 0 fine, or warnings only; 64 something to fix first; 70 a node can't be reached"


def parser() -> Parser:
    parser = options_parser("mingpt.preflight", "Look at all nodes before training; run it once on each.", EPILOG)
    parser.add_argument("--seconds", type=float, default=60, help="longest wait for the other nodes (default: 60)")
    parser.add_argument("--json", action="store_true", help="print all that was found as JSON")
    return parser


def main(arguments: list[str]) -> int:
    options = parse(arguments, parser())
    unsaid = options.nproc_per_node is None
    options.nproc_per_node = options.nproc_per_node or "1"  # or torch would be asked, which takes seconds to import
    try:
        if not 0 <= options.seconds < math.inf:
            raise UserError(f"--seconds {options.seconds:g}: a number, 0 or more")
        node = Torchrun.compose(options, os.environ)
        config = compose.configure(node.overrides, node.fewest_processes)
    except UserError as mistake:
        complain(f"error: {mistake}")
        return USER_ERROR
    assert config is not None  # the parser has answered --help
    report = inspect(node, config, None if unsaid else node.processes, options.seconds)
    say(report.as_json() if options.json else report.as_text())
    return report.code
