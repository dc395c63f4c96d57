"""`python -m mingpt.data.prepare`, which is in prepare/prepare.py."""

from mingpt.command import run

if __name__ == "__main__":
    run("mingpt.prepare.prepare")
