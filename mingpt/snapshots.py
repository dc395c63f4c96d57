"""`python -m mingpt.snapshots` is `mingpt snapshots`."""

from mingpt.__main__ import main

if __name__ == "__main__":
    main("snapshots")
