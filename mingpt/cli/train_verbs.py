"""The options of the verbs that train, and of those that look at a config or machines before."""

import argparse

from mingpt.cli.command import Parser
from mingpt.cli.options import config_places, json_option


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
