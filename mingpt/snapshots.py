"""`python -m mingpt.snapshots`: see commands/snapshots.py."""

import sys

from mingpt.commands.snapshots import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
