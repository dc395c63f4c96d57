"""`python -m mingpt.generate`: see commands/generate.py."""

import sys

from mingpt.commands.generate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
