"""`python -m mingpt.data.fetch` is `mingpt fetch`."""

from mingpt.__main__ import main

if __name__ == "__main__":
    main("fetch")
