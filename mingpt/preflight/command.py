"""`mingpt preflight [options] [overrides]`: check all nodes before training; run it once on each.

It takes the options of `mingpt launch`, and reads the platform's variables as that does. All that it leaves behind is
an empty run.dir. Exit codes: 0 fine, or warnings only; 64 something to fix first; 70 a node can't be reached.
"""

import math
import os
from argparse import Namespace
from dataclasses import asdict

from mingpt.cli.console import say, say_json
from mingpt.compose import compose
from mingpt.errors import FINISHED, UserError
from mingpt.launch.torchrun import Torchrun
from mingpt.preflight.inspection import Inspection


def preflight(options: Namespace) -> int:
    if os.environ.get("PREFLIGHT") == "0":
        say("preflight: left out, by PREFLIGHT=0")
        return FINISHED
    chosen = options.nproc_per_node is not None
    options.nproc_per_node = options.nproc_per_node or "1"  # the default asks torch, which takes seconds to import
    if not 0 <= options.seconds < math.inf:
        raise UserError(f"--seconds {options.seconds:g}: give a number, 0 or more")
    node = Torchrun.compose(options, os.environ)
    config = compose.configure(node.overrides, node.fewest_processes)
    report = Inspection(node, config, node.processes if chosen else None, options.seconds).run()
    say_json({"code": report.code} | asdict(report)) if options.json else say(report.as_text())
    return report.code
