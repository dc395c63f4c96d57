"""`python -m mingpt.data.fetch`: see prepare/fetch.py."""

from mingpt.command import run

if __name__ == "__main__":
    run("mingpt.prepare.fetch")
