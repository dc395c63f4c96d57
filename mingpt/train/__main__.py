"""`python -m mingpt.train` is `mingpt train`, as torchrun starts it."""

from mingpt.__main__ import main

if __name__ == "__main__":
    main("train")
