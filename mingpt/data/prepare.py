"""`python -m mingpt.data.prepare`: see prepare/prepare.py."""

import sys

from mingpt.prepare.prepare import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
