"""`python -m mingpt.data.fetch`: see prepare/fetch.py."""

import sys

from mingpt.prepare.fetch import main

if __name__ == "__main__":
    sys.exit(main())
