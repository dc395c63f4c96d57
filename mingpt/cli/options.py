"""Options that several verbs share, and what a verb's docstring tells of it."""

from collections.abc import Callable
from typing import Any

from mingpt.cli.command import FROM_ENV, FROM_ENV_HELP, Parser


def json_option(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs: one JSON document in one line on stdout")


def config_places(parser: Parser) -> None:
    """Where configs come from."""
    parser.add_argument(FROM_ENV, action="store_true", help=FROM_ENV_HELP)
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder of your own with experiment/, model/, …")
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="begin with NAME.yaml (train)")
    parser.add_argument("--config-path", "-cp", metavar="DIR", help="a folder in place of this project's configs/")


def snapshot(parser: Parser, otherwise: str = "", step: type | Callable[[str], Any] = int) -> None:
    """otherwise: which snapshots without --step; empty: there is no --step."""
    parser.add_argument(
        "url", metavar="URL", help="RUN, RUN@STEP or RUN@best, by validation loss (or a folder of snapshots, or of one)"
    )
    if otherwise:
        parser.add_argument("--step", type=step, metavar="N", help=f"the snapshot of this step (default: {otherwise})")


def model(parser: Parser) -> None:
    """Which weights of a run are used."""
    snapshot(parser, "the newest")
    parser.add_argument("--ema", action="store_true", help="the mean of the weights, of a run with optimizer.ema")


def snapshots_dir(parser: Parser) -> None:
    parser.add_argument("--snapshots", metavar="URL", help="snapshot.dir, if the run has set one")


def described(options: Callable[[Parser], None]) -> tuple[str, str, str]:
    """What a verb's docstring says: what it does, the exit codes if they are its own, an example."""
    text, _, example = (options.__doc__ or "").partition("Example: ")
    about, _, codes = text.partition("Exit codes: ")
    return about, f": {codes}" if codes else "", example.strip()
