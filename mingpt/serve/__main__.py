"""`mingpt serve URL`: answer requests in OpenAI's form with a snapshot's model, and show a page with a text box."""

import argparse
from typing import NoReturn

from mingpt.command import program, run


def parser() -> argparse.ArgumentParser:
    from mingpt.config.commandline import Parser

    parser = Parser(
        prog=program("mingpt.serve"),
        description=__doc__,
        epilog="MINGPT_SERVE_KEY in the environment: only requests with this key are answered.",
    )
    parser.add_argument("url", metavar="URL", help="a run's directory, its snapshots folder, or one step's folder")
    parser.add_argument("--step", type=int, help="the snapshot of this step (default: the newest)")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU where there is one (default)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen; 0.0.0.0: everywhere (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free (default: 8000)")
    parser.add_argument("--queue", type=int, default=16, help="how many requests may wait (default: 16)")
    parser.add_argument("--prompt-tokens", type=int, default=8192, help="longest prompt (default: 8192)")
    parser.add_argument("--tokens", type=int, default=2048, help="most tokens that one request adds (default: 2048)")
    parser.add_argument(
        "--seconds", type=float, default=300, help="a request ends after these, waiting included (default: 300)"
    )
    parser.add_argument(
        "--drain", type=float, default=20, metavar="SECONDS",
        help="after SIGTERM or Ctrl-C, how long requests may take to end (default: 20)",
    )  # fmt: skip
    return parser


def main() -> NoReturn:
    run("mingpt.serve.command")


if __name__ == "__main__":
    main()
