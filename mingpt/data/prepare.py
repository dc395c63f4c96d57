"""`mingpt prepare`, which is in prepare/prepare.py."""

from typing import NoReturn

from mingpt.command import run


def main() -> NoReturn:
    run("mingpt.prepare.prepare")


if __name__ == "__main__":
    main()
