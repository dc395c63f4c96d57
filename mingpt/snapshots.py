"""`mingpt snapshots`: look at the snapshots of a run, check, copy, prune and export them.

URL is RUN or RUN@STEP, where RUN is a run's directory; or its snapshots folder, or a step's folder. Any fsspec URL.
"""

import argparse
from collections.abc import Callable
from typing import NoReturn

from mingpt.command import program, run

# Help texts, by command.
TEXTS = {
    "list": """A table of the steps, or of the runs in a folder. Exit code 1 if one is damaged.

    The manifests are read, and of the parts the sizes.
    """,
    "verify": "Read everything and compare it with the checksums. Exit code 1 if anything is damaged.",
    "digest": "The digest of the newest snapshot (or of --step) alone on stdout, after verifying it.",
    "show": "What the manifest of the newest snapshot (or of --step) says: config, attempts, numerics, sizes.",
    "prune": "Delete what need not stay. Without --keep and --keep-every: as the newest snapshot's config says.",
    "rewind": "Go back: URL@9000 continues from step 9000, and newer snapshots are set aside. Nothing is deleted.",
    "copy": "Copy snapshots, and the metrics of their run, to TO, another run's directory.",
    "export": "Write a GPT as a folder that transformers and vLLM load: of RUN@STEP, of --step, or the newest.",
}


def _count(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return number


def parser() -> argparse.ArgumentParser:
    from mingpt.config.commandline import Parser

    parser = Parser(prog=program("mingpt.snapshots"), description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, one_step: str | None, as_json: bool = False) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=TEXTS[name], description=TEXTS[name])
        command.add_argument("url", metavar="URL", help="RUN or RUN@STEP (or a folder of snapshots, or of one)")
        if one_step:
            command.add_argument("--step", type=int, help=f"this step instead of {one_step}")
        if as_json:
            command.add_argument("--json", action="store_true", help="for programs")
        return command

    add("list", "all", as_json=True)
    add("verify", "all")
    add("digest", "the newest")
    add("show", "the newest", as_json=True)
    prune = add("prune", None)
    prune.add_argument("--keep", type=_count(1), metavar="N", help="the newest N stay")
    prune.add_argument("--keep-every", type=_count(0), metavar="N", help="multiples of N stay; 0: none")
    prune.add_argument(
        "--keep-best", action=argparse.BooleanOptionalAction, help="the best by validation loss stays, or need not"
    )
    prune.add_argument(
        "--older-than", type=_count(1), metavar="SECONDS",
        help="age from which files without a snapshot are a dead writer's (default: 86400, a day)",
    )  # fmt: skip
    prune.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    back = add("rewind", None)
    back.add_argument("--step", type=_count(0), metavar="N", help="the step to go on from, as RUN@N")
    back.add_argument("--undo", action="store_true", help="bring back what the newest rewind has set aside")
    back.add_argument("--snapshots", metavar="URL", help="snapshot.dir, if the run has set one")
    back.add_argument("--hot-dir", default="/dev/shm", metavar="FOLDER", help="snapshot.hot_dir (default: /dev/shm)")
    copy = add("copy", "all")
    copy.add_argument(
        "target", metavar="TO", help="where to: a run's directory, its snapshots folder, or a step's folder"
    )
    export = add("export", "the newest")
    export.add_argument("folder", metavar="FOLDER", help="where to: a local folder, or any fsspec URL")
    export.add_argument("--overwrite", action="store_true", help="replace what is there")
    return parser


def main() -> NoReturn:
    run("mingpt.commands.snapshots")


if __name__ == "__main__":
    main()
