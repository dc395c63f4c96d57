"""`python -m mingpt.launch` is `mingpt launch`."""

from mingpt.__main__ import main

if __name__ == "__main__":
    main("launch")
