"""`mingpt sweep KEY=A,B …`: train one run for each combination of values, here, on Slurm or on SkyPilot."""

import argparse
import signal
import sys
from typing import NoReturn

from mingpt.command import program, run
from mingpt.console import complain
from mingpt.errors import STOPPED

WHERE = ("local", "slurm", "sky")
LOSSES = ("val_loss", "loss")


def parser() -> argparse.ArgumentParser:
    from mingpt.config.commandline import Parser, add_options

    parser = Parser(
        prog=program("mingpt.sweep"),
        description=__doc__,
        epilog="Exit codes: 0 all finished or submitted; 64 a user error; 70 a trial crashed, run the command again; "
        "75 stopped on request, run the command again.",
    )
    parser.add_argument("--on", choices=WHERE, default="local", help="where the trials run (local)")
    parser.add_argument("--name", default="sweep", help="the sweep's name: its trials are in DIR/NAME (sweep)")
    parser.add_argument("--dir", default="runs", help="the folder of sweeps; for sky a bucket's, s3://… (runs)")
    parser.add_argument("--zip", action="store_true", help="pair the values one by one, in place of all combinations")
    parser.add_argument("--parallel", type=int, metavar="K", help="trials at a time (local: 1; slurm: no limit)")
    parser.add_argument("--optimize", choices=LOSSES, help="local: search for the lowest, with Optuna; needs --trials")
    parser.add_argument("--trials", type=int, metavar="N", help="how many trials the search has")
    parser.add_argument("--prune", choices=("median",), help="local: stop trials that are worse than the median")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and start nothing")
    parser.add_argument("--nproc-per-node", metavar="N", help="local: processes of each trial, by mingpt launch")
    parser.add_argument(
        "--launcher-args", default="", metavar="TEXT", help='more of sbatch or sky jobs launch: ="--time=60"'
    )
    add_options(parser)
    parser.add_argument("overrides", nargs="*", help="Hydra's: key=a,b, choice(…), range(…), glob(…), interval(…)")
    return parser


class Stopped(BaseException):
    """Ctrl-C, SIGTERM or SIGHUP while no trial runs here."""


def main() -> NoReturn:
    def stop(number: int, frame: object) -> NoReturn:
        raise Stopped

    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, stop)  # while trials run, local.run has its own
        run("mingpt.commands.sweep")
    except Stopped:
        complain("stopped on request: the same command again goes on")
        sys.exit(STOPPED)


if __name__ == "__main__":
    main()
