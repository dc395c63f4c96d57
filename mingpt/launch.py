"""`python -m mingpt.launch [options] [overrides]`: the one command to start on each node.

It composes a torchrun command, prints it, and runs it through torch's own elastic agent. What it adds to torchrun: the
config is validated before any worker starts; nodes and addresses come from the platform, if there is one; torchrun's
options are set for runs that get killed, moved and resized; workers are restarted as long as snapshots progress; and
the exit code says what to do: 0 finished, 64 fix a mistake, 70 crashed: try again, 75 stopped on request: start again.
"""

import os
import sys

from mingpt.lifetime import Lifetime

if __name__ == "__main__":
    lifetime = Lifetime(says="launch: exit code {code}: ")
    lifetime.begin()
    # Not before: signals must be watched by then. Here, too, a thread does that: torch's waits for other nodes keep the
    # main thread from hearing them.
    from mingpt.launcher import launch

    code = launch(sys.argv[1:], lifetime)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
