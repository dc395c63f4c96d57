"""`python -m mingpt.snapshots`: see commands/snapshots.py."""

from mingpt.command import run

if __name__ == "__main__":
    run("mingpt.commands.snapshots")
