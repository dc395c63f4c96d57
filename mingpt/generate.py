"""`python -m mingpt.generate`: see commands/generate.py."""

from mingpt.command import run

if __name__ == "__main__":
    run("mingpt.commands.generate")
