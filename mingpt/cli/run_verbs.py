"""The options of the verbs that look at what runs have done, and use their models."""

from pathlib import Path

from mingpt.cli.command import Parser
from mingpt.cli.options import config_places, json_option, model, snapshots_dir


def past(parser: Parser) -> None:
    """Where a past run's things lie, and which of its attempts is followed."""
    parser.add_argument(
        "overrides", metavar="OVERRIDE", nargs="*", help="what is so on this machine: data.path=…, world.device=…"
    )
    parser.add_argument("--attempt", type=int, metavar="A", help="as this attempt computed it (default: the newest)")
    snapshots_dir(parser)


def generate(parser: Parser) -> None:
    """Continue texts with a snapshot's model.

    Example: mingpt generate runs/shakespeare-char --prompt "HAMLET:" --tokens 300 --seed 2
    """
    model(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt", metavar="TEXT", help="the text to continue (default: a new line; of plain numbers: 0)"
    )
    source.add_argument("--file", metavar="FILE", help="continue what is in this file or URL; -: standard input")
    parser.add_argument("--lines", action="store_true", help="each line of the file is a prompt of its own")
    parser.add_argument("--samples", type=int, metavar="N", default=1, help="texts for each prompt (default: 1)")
    parser.add_argument("--tokens", type=int, metavar="N", default=200, help="how many tokens to add (default: 200)")
    parser.add_argument(
        "--temperature", type=float, metavar="T", default=0.8, help="0: always the likeliest token (default: 0.8)"
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="choose among the k likeliest tokens (default: among all)"
    )
    parser.add_argument("--top-p", type=float, metavar="P", help="and among the fewest whose chances add up to P")
    parser.add_argument(
        "--seed", type=int, metavar="N", default=1, help="the same seed gives the same texts (default: 1)"
    )
    parser.add_argument(
        "--batch", type=int, metavar="N", default=16, help="texts at a time; fewer need less memory (default: 16)"
    )
    parser.add_argument("--speed", action="store_true", help="say on stderr how many tokens a second were drawn")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU where there is one (default)"
    )


def evaluate(parser: Parser) -> None:
    """How good a snapshot's model is: loss, perplexity, bits per byte of text, accuracy where data has labels.

    The data are those of the snapshot's config, changed by overrides, and encoded in the snapshot's vocabulary.
    Alone or as one of torchrun's or srun's processes, it prints the same figures.

    Example: mingpt evaluate runs/shakespeare-char@best data=char data.path=other.txt
    """
    model(parser)
    parser.add_argument(
        "overrides", metavar="OVERRIDE", nargs="*", help="data=…, data.path=…, world.device=…: as train"
    )
    config_places(parser)
    json_option(parser)


def report(parser: Parser) -> None:
    """One HTML page of what one run or several have done.

    Example: mingpt report runs/a runs/b --out both.html
    """
    parser.add_argument(
        "urls", metavar="RUN", nargs="+", help="a run's directory, its snapshots folder, or a folder of runs; any URL"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where the page goes (default: RUN/report.html; else ./report.html)"
    )


def replay(parser: Parser) -> None:
    """Compute step N of a run again, from the nearest snapshot before it, and compare with the bits that it recorded.

    Then: loss by sample, gradient and update by layer; or, with --out, the snapshot of that step. The run is only read.
    One process is enough, whatever the run had.

    Exit codes: 0 the bits are those that the run recorded (or it recorded none); 1 they are not; 64 an error to fix

    Example: mingpt replay runs/a@1200 --drop 17,93
    """
    parser.add_argument("url", metavar="RUN@N", help="a run's directory (any fsspec URL), @ and the step, from 1")
    parser.add_argument("--step", type=int, metavar="N", help="the step, if RUN stands alone")
    parser.add_argument("--out", metavar="DIR", help="write the state after it to DIR, as that run's snapshot")
    past(parser)
    parser.add_argument("--drop", metavar="P,P", default="", help="and again without these positions of the batch")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="and again with this setting")
    parser.add_argument("--then", type=int, default=0, metavar="K", help="and the K steps that would have followed")
    parser.add_argument("--samples", type=int, default=3, metavar="K", help="show the K worst and best (default: 3)")
    json_option(parser)


def log(parser: Parser) -> None:
    """The runs in a folder, their attempts and snapshots; with --graph each fork below its parent.

    DIR is a folder of runs, or one run's directory; any fsspec URL. Nothing in it is changed.

    Example: mingpt log runs --graph
    """
    parser.add_argument("url", metavar="DIR", help="a folder of runs, or one run's directory")
    parser.add_argument("--graph", action="store_true", help="draw a tree, each fork below the attempt that it left")
    json_option(parser)


def diff(parser: Parser) -> None:
    """Where two runs parted: settings, data, code, machine, the first other step and tensor.

    A and B are runs' directories, or RUN@STEP for one snapshot; any fsspec URL. With --attempts, two attempts of one
    run. Nothing in the runs is changed.

    Exit codes: 0 done; 1 with --exit-code, if they differ; 64 an error that the user must fix; 70 crashed, try again

    Example: mingpt diff runs/a runs/b
    """
    parser.add_argument("a", metavar="A", help="a run's directory, or RUN@STEP")
    parser.add_argument("b", metavar="B", nargs="?", help="the other one")
    parser.add_argument("--attempts", type=int, nargs=2, metavar="N", help="compare two attempts of A")
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 if they differ (default: 0 always)")
    json_option(parser)


def fork(parser: Parser) -> None:
    """A run of its own in NEW, which continues step STEP of RUN.

    NEW's first snapshot shares its files with RUN's: nothing is copied on one disk, nothing is uploaded within one
    bucket. The keys are those of `mingpt train`; all others keep the values that RUN had at that step.

    Example: mingpt fork runs/a@500 runs/b optimizer.lr=3e-4
    """
    parser.add_argument("source", metavar="RUN@STEP", help="a run's directory, or its snapshots folder; any URL")
    parser.add_argument("target", metavar="NEW", help="the new run's directory, which becomes its run.dir; any URL")
    parser.add_argument("--trust", action="store_true", help="RUN is your own: take all places that its config names")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="what is different in the new run")
