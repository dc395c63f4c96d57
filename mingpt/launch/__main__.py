"""`mingpt launch [options] [overrides]`: the one command to start on each node.

It composes a torchrun command, prints it, and runs it through torch's own elastic agent. What it adds to torchrun: the
config is validated before any worker starts; nodes and addresses come from the platform, if there is one; torchrun's
options are set for runs that get killed, moved and resized; workers are restarted as long as snapshots progress; and
the exit code says what to do: 0 finished, 64 fix a mistake, 70 crashed: try again, 75 stopped on request: start again.
"""

from typing import NoReturn

from mingpt.world import entry
from mingpt.world.lifetime import Lifetime


def load() -> entry.Program:
    from mingpt.launch.launcher import launch

    return launch


def main() -> NoReturn:
    entry.run(load, Lifetime(says="launch: exit code {code}: "), worker=False)


if __name__ == "__main__":
    main()
