"""`mingpt launch [options] [overrides]`: the one command to start on each node.

It composes a torchrun command, prints it, and runs it through torch's elastic agent. It adds to torchrun:
- the config is validated before any worker starts;
- the number of nodes and their addresses come from the platform, if there is one;
- torchrun's options are set for runs that get killed, moved and resized;
- workers are restarted as long as attempts leave new snapshots.

Exit codes: 0 finished; 64 an error that the user must fix; 70 crashed, try again; 75 stopped on request, start again.
"""

from typing import NoReturn

from mingpt.world import entry
from mingpt.world.lifetime import Lifetime


def main() -> NoReturn:
    entry.run("mingpt.launch.launcher", "launch", Lifetime(prefix="launch: exit code {code}: "), worker=False)


if __name__ == "__main__":
    main()
