"""`python -m mingpt.evaluate` is `mingpt evaluate`, as torchrun starts it."""

from mingpt.__main__ import main

if __name__ == "__main__":
    main("evaluate")
