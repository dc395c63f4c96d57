"""`python -m mingpt.preflight` is `mingpt preflight`."""

from mingpt.__main__ import main

if __name__ == "__main__":
    main("preflight")
