"""The options of `mingpt snapshots` and its commands, two of which are verbs, too."""

import argparse
from functools import partial

from mingpt.cli.command import Parser
from mingpt.cli.options import described, json_option, model, snapshot, snapshots_dir


def count(least: int, text: str) -> int:
    """The value of an option."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
    return int(text)


NUMBER, POSITIVE = partial(count, 0), partial(count, 1)


def list_(parser: Parser) -> None:
    """A table of the steps, or of the runs in a folder. Exit code 1 if one is damaged.

    The manifests are read, and of the parts the sizes.

    Example: mingpt snapshots list runs/a
    """
    snapshot(parser, "all")
    json_option(parser)


def verify(parser: Parser) -> None:
    """Read everything and compare it with the checksums. Exit code 1 if anything is damaged.

    Example: mingpt snapshots verify s3://bucket/run1
    """
    snapshot(parser, "all")


def digest(parser: Parser) -> None:
    """The digest of the newest snapshot (or of --step) alone on stdout, after verifying it.

    Example: mingpt snapshots digest runs/a@500
    """
    snapshot(parser, "the newest")


def show(parser: Parser) -> None:
    """What the manifest of the newest snapshot (or of --step) says: config, attempts, numerics, sizes.

    Example: mingpt snapshots show runs/a
    """
    snapshot(parser, "the newest")
    json_option(parser)


def prune(parser: Parser) -> None:
    """Delete what need not stay. Without --keep and --keep-every: as the newest snapshot's config says.

    What a rewind has set aside goes, too: that can then not be undone.

    Example: mingpt snapshots prune runs/a --keep 2 --dry-run
    """
    snapshot(parser)
    parser.add_argument("--keep", type=POSITIVE, metavar="N", help="the newest N stay")
    parser.add_argument("--keep-every", type=NUMBER, metavar="N", help="multiples of N stay; 0: none")
    parser.add_argument(
        "--keep-best", action=argparse.BooleanOptionalAction, help="the best by validation loss stays, or not"
    )
    parser.add_argument(
        "--older-than", type=POSITIVE, metavar="SECONDS",
        help="age from which files without a snapshot are a dead writer's (default: 86400, a day)",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="only print what would be deleted")


def rewind(parser: Parser) -> None:
    """Go back: URL@9000 continues from step 9000, and newer snapshots are set aside. Nothing is deleted.

    Example: mingpt rewind runs/a@500
    """
    snapshot(parser, "of URL@N", NUMBER)
    parser.add_argument("--undo", action="store_true", help="bring back what the newest rewind has set aside")
    snapshots_dir(parser)
    parser.add_argument("--hot-dir", default="/dev/shm", metavar="FOLDER", help="snapshot.hot_dir (default: /dev/shm)")


def export(parser: Parser) -> None:
    """Write a GPT as a folder that transformers and vLLM load: of RUN@STEP, of --step, or the newest.

    --push makes a model of the hub of it, with a card. HF_TOKEN in the environment must be one that may write.

    Example: mingpt export runs/a@best exported
    """
    model(parser)
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help="where to: a local folder, or any fsspec URL")
    parser.add_argument("--push", metavar="OWNER/NAME", help="to the hub, too, or only")
    parser.add_argument("--public", action="store_true", help="if --push makes the model: for all to see")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")


def snapshots(parser: Parser) -> None:
    """Look at the snapshots of a run, check, prune and export them.

    URL is RUN or RUN@STEP, where RUN is a run's directory; or its snapshots folder, or a step's folder. Any fsspec URL.

    Exit codes: 0 done; 1 a snapshot is damaged; 64 an error that the user must fix; 70 crashed, try again

    Example: mingpt snapshots list runs/a
    """
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for options in (list_, verify, digest, show, prune, rewind, export):
        name, (about, _, example) = options.__name__.rstrip("_"), described(options)
        command: Parser = commands.add_parser(name, help=about, description=about)
        command.example = example
        options(command)
        module = "export" if options is export else "snapshots"
        command.set_defaults(function=f"commands.{module}:{name}_command")
