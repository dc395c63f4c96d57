"""`mingpt sky-check RECIPE [options of sky launch]`: refuse what can't work, before a machine is rented.

It starts nothing. It looks for nodes that don't share the run's place, missing variables, overrides that are refused,
too many processes, machines that nobody has. If it finds nothing, it prints the sky command.
"""

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from mingpt.command import command, program
from mingpt.console import complain, say
from mingpt.errors import FINISHED, UserError
from mingpt.redact import BLANK, without_secrets

# GPUs in a machine, by `sky show-gpus -a` in SkyPilot's documentation (compute/gpus.html, as of November 2026).
SIZES = {
    "A10": (1, 2, 4), "A10G": (1, 4, 8), "A100": (1, 2, 4, 8, 16), "A100-80GB": (1, 2, 4, 8), "H100": (1, 2, 4, 8, 12),
    "H200": (1, 8), "L4": (1, 2, 4, 8), "L40S": (1, 2, 4, 8), "T4": (1, 2, 4, 8), "V100": (1, 2, 4, 8),
}  # fmt: skip
LISTED = {"", "*", "aws", "gcp", "azure"}  # clouds for which the table is meant; "": the user names none
EXAMPLES = {"RUN_DIR": "s3://bucket/run1", "BUCKET": "s3://bucket/runs", "BUCKET_NAME": "my-runs"}
# SkyPilot's other options, of `sky launch`, `sky jobs launch` and `sky serve up`: those with a value, and flags.
VALUES = (
    "--config --cluster -c --name -n --service-name --workdir --region --zone --cpus --memory --disk-size --disk-tier "
    "--network-tier --image-id --local-disk --instance-type -t --ports --priority --idle-minutes-to-autostop -i "
    "--wait-for --clone-disk-from --clone --git-url --git-ref --workspace -w --job-recovery --pool -p --num-jobs "
    "--job-group"
)
FLAGS = (
    "--dryrun --detach-run -d -no-d --docker --use-spot --no-use-spot --async --no-async --down --retry-until-up -r "
    "--yes -y --no-setup --fast --resize --no-job-group"
)


def parser() -> argparse.ArgumentParser:
    from mingpt.config.commandline import Parser

    parser = Parser(prog=program("mingpt.commands.sky_check"), description=__doc__, allow_abbrev=False)
    parser.add_argument("recipe", metavar="RECIPE", help="a file such as recipes/train.yaml")
    parser.add_argument("--num-nodes", type=int, metavar="N", help="in place of the recipe's")
    parser.add_argument("--gpus", metavar="NAME:N", help="of each node, in place of the recipe's; none: no GPUs")
    parser.add_argument("--infra", "--cloud", metavar="CLOUD", default="", help="where; slurm: the nodes share a home")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="one of the recipe's `envs`")
    parser.add_argument("--secret", action="append", default=[], metavar="NAME[=VALUE]", help="one of its `secrets`")
    parser.add_argument("--env-file", "--secret-file", dest="file", help=argparse.SUPPRESS)
    for name in VALUES.split():
        parser.add_argument(name, dest="passed_on", help=argparse.SUPPRESS)
    for name in FLAGS.split():
        parser.add_argument(name, dest="passed_on", action="store_true", help=argparse.SUPPRESS)
    return parser


@command()
def sky_check_command(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    task = _read(options.recipe)
    if problems := list(dict.fromkeys(_problems(task, options))):
        raise UserError(*problems)
    say(f"nothing found\n{_command(task, arguments, options.secret)}")
    return FINISHED


def _read(file: str) -> dict[str, Any]:
    """The recipe; `resources` becomes a list of those that SkyPilot may choose from."""
    import yaml

    try:
        task = yaml.safe_load(Path(file).read_text())
        top = dict(task.get("resources") or {})
        resources = [{**top, **one} for one in top.get("any_of") or top.get("ordered") or [{}]]
        recovers = any("job_recovery" in one for one in resources)
        envs, secrets = (dict(task.get(name) or {}) for name in ("envs", "secrets"))
        return {**task, "envs": envs, "secrets": secrets, "resources": resources, "recovers": recovers}
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}: give a recipe such as recipes/train.yaml") from error
    except (AttributeError, TypeError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{file}: SkyPilot can't read this: give a recipe such as recipes/train.yaml") from error


def _problems(task: Mapping[str, Any], options: argparse.Namespace) -> Iterator[str]:
    """Everything that is wrong, each with what to do. Prints what could not be checked."""
    values: dict[str, str | None] = {}
    yield from _variables(task, options, values)
    nodes = (task.get("num_nodes") or 1) if options.num_nodes is None else options.num_nodes
    if not isinstance(nodes, int) or nodes < 1:
        yield f"--num-nodes {nodes}: give a number from 1"
        nodes = 1
    choices = list(_choices(task, options.gpus))
    cloud = str(options.infra or task["resources"][0].get("infra") or "").split("/")[0].lower()
    yield from (problem for choice in choices if (problem := _not_sold(choice, cloud)))
    if "EXPERIMENT" not in task["envs"]:
        complain(f"{options.recipe}: it has no EXPERIMENT in `envs`, so the run's config is not checked")
        return
    name = next((name for name in EXAMPLES if name in task["envs"]), "RUN_DIR")
    place = values.get(name, "")
    if name == "BUCKET_NAME" and place is not None:  # which SkyPilot makes
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", place):
            yield f"{name}={place}: give the name alone, such as {EXAMPLES[name]}"
        place = f"s3://{place}/sky-check"
    overrides = [f"experiment={values['EXPERIMENT']}"]
    overrides += [f"run.dir={place}{'/sky-check' * (name == 'BUCKET')}"] if place else []
    for word in (values.get("OVERRIDES") or "").split():
        if word.startswith("-") and not word.startswith("--config-"):
            yield f"OVERRIDES: {without_secrets(word)} is an option, and overrides are key=value: leave it out"
        else:
            overrides.append(word)
    if place is not None and cloud != "slurm":
        yield from _not_shared(name, overrides, nodes, task["recovers"])
    each = {choice: max(1, math.ceil(_count(choice))) for choice in choices}
    if wish := values.get("NPROC_PER_NODE"):
        if not wish.isdecimal() or not int(wish):
            yield f"NPROC_PER_NODE={wish}: give a number from 1, or leave it out"
        each = {f"NPROC_PER_NODE={wish}": int(wish) if wish.isdecimal() else 1}
    most = max(each, key=lambda choice: each[choice])
    # The machines have these, and a config may read them: trackers do, and `${oc.env:…}`.
    os.environ.update({"SKYPILOT_TASK_ID": "sky-check", **{k: v for k, v in values.items() if v is not None}})
    yield from (alone := _refused(overrides, 1))
    if "NPROC_PER_NODE" in task["envs"]:  # else it does not train
        several = (problem for problem in _refused(overrides, max(1, nodes * each[most])) if problem not in alone)
        yield from (f"--num-nodes {nodes} with {most or 'no GPUs'}: {problem}" for problem in several)


def _variables(task: Mapping[str, Any], options: argparse.Namespace, values: dict[str, str | None]) -> Iterator[str]:
    """What is wrong with the recipe's variables and secrets. values: gets them as the machines do (None: missing)."""
    values |= {n: None if v is None else str(v) for n, v in {**task["envs"], **task["secrets"]}.items()}
    known = list(values)
    if options.file:
        yield f"{options.file}: files of variables are not read here: give --env NAME=VALUE and --secret NAME"
    for option, words in (("--env", options.env), ("--secret", options.secret)):
        for name, equals, text in (word.partition("=") for word in words):
            if not name:
                yield f"{option} {equals}{text}: a name is missing: give {option} NAME=VALUE"
                continue
            if name not in known and (close := get_close_matches(name, known, n=1, cutoff=0.8)):
                yield f"{option} {name}: {options.recipe} does not read it: write {close[0]}"
            if not equals and name not in os.environ:
                yield f"{option} {name}: it is not set in this shell: export it, or write {option} {name}=…"
            values[name] = text if equals else os.environ.get(name, "")
    for name in (name for name in known if values[name] is None):
        how = f"--secret {name}" if name in task["secrets"] else f"--env {name}={EXAMPLES.get(name, '…')}"
        yield f"{name} is required, and {options.recipe} has no default: {how}"


def _choices(task: Mapping[str, Any], gpus: str | None) -> Iterator[str]:
    """The GPUs of a node as NAME:N; several where SkyPilot may choose; "" for none."""
    if gpus is not None:
        yield "" if gpus.lower() == "none" else gpus
        return
    for one in task["resources"]:
        held = one.get("accelerators") or ""
        if isinstance(held, dict):
            held = [f"{name}:{number or 1}" for name, number in held.items()]
        yield from map(str, held) if isinstance(held, list) else [str(held)]


def _count(choice: str) -> float:
    """How many GPUs a node has; 0: this can't be read, or there are none."""
    number = choice.partition(":")[2] or "1"
    return float(number) if choice and re.fullmatch(r"\d+(\.\d+)?", number) else 0


def _not_sold(choice: str, cloud: str) -> str | None:
    name, count = choice.partition(":")[0], _count(choice)
    sizes = SIZES.get(name.upper(), ())
    if not choice or count in sizes or (sizes and 0 < count < 1):
        return None
    if not count:
        return f"--gpus {choice}: give NAME:NUMBER, such as L4:1, or none"
    if not sizes or cloud not in LISTED:
        complain(f"{choice}{f' on {cloud}' * bool(cloud)}: sky-check does not know in which numbers it is sold")
        return None
    return (
        f"--gpus {choice}: no cloud of SkyPilot's list has machines with so many: take {name}:"
        f"{f' or {name}:'.join(map(str, sizes))}, or name the cloud that has them: --infra CLOUD"
    )


def _not_shared(name: str, overrides: Iterable[str], nodes: int, recovers: bool) -> Iterator[str]:
    """As recipes/setup.sh has it: an absolute path may be a mount, and the nodes compare what they see there."""
    *_, place = "", *(word.partition("=")[2] for word in overrides if word.startswith("run.dir="))
    path = re.sub("^(file|local)://", "", place)
    if "://" in path or path.startswith("/") or not (recovers or nodes > 1):
        return
    what = f"run.dir={place} is" if place else f"without {name} the run is in"
    where = (
        "a disk that is lost when the job moves" if recovers else f"each node's own disk, and there are {nodes} nodes"
    )
    cure = f"give a bucket (--env {name}={EXAMPLES[name]}) or a shared mount"
    alone = "" if recovers else ", or take one node (--num-nodes 1); Slurm's nodes share a home: --infra slurm"
    yield f"{what} a folder on {where}: {cure}{alone}"


def _refused(overrides: list[str], processes: int) -> tuple[str, ...]:
    from mingpt.config import compose

    try:
        compose.configure(overrides, processes)
        return ()
    except UserError as error:
        return error.problems


def _command(task: Mapping[str, Any], arguments: list[str], secrets: list[str]) -> str:
    """The sky command for a shell, without the values of secrets."""
    verb = ["serve", "up"] if "service" in task else ["jobs", "launch"] if task["recovers"] else ["launch"]
    hidden = {word: f"{word.partition('=')[0]}={BLANK}" for word in secrets if "=" in word}
    hidden |= {f"--secret={word}": f"--secret={text}" for word, text in hidden.items()}
    return shlex.join(["sky", *verb, *(hidden.get(word, str(without_secrets(word))) for word in arguments)])


def main() -> NoReturn:
    sys.exit(sky_check_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
