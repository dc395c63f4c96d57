"""`python -m mingpt.report` is `mingpt report`."""

from mingpt.__main__ import main

if __name__ == "__main__":
    main("report")
