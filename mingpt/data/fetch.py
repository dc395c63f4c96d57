"""`python -m mingpt.data.fetch`, which is in prepare/fetch.py."""

from mingpt.command import run

if __name__ == "__main__":
    run("mingpt.prepare.fetch")
