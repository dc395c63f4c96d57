"""`mingpt preflight`, which is in command.py."""

from typing import NoReturn

from mingpt.command import run


def main() -> NoReturn:
    run("mingpt.preflight.command")


if __name__ == "__main__":
    main()
