"""`mingpt fetch`, which is in prepare/fetch.py."""

from typing import NoReturn

from mingpt.command import run


def main() -> NoReturn:
    run("mingpt.prepare.fetch")


if __name__ == "__main__":
    main()
