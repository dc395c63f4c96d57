"""`python -m mingpt` is the `mingpt` command."""

import sys

from mingpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
