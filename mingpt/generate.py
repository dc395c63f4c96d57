"""`python -m mingpt.generate` is `mingpt generate`."""

from mingpt.__main__ import main

if __name__ == "__main__":
    main("generate")
