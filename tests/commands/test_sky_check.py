"""`mingpt sky-check`: each shape that can't work is refused, and each command of the documents passes."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from mingpt.commands.sky_check import FLAGS, VALUES, parser, sky_check_command
from paths_kit import ROOT

SHARED = "train.yaml --env RUN_DIR=s3://bucket/run1"
DISKS = (
    "a folder on each node's own disk, and there are {} nodes: give a bucket (--env RUN_DIR=s3://bucket/run1) or a "
    "shared mount, or take one node (--num-nodes 1); Slurm's nodes share a home: --infra slurm"
)
MOVES = (
    "a folder on a disk that is lost when the job moves: give a bucket (--env BUCKET=s3://bucket/runs) or a shared "
    "mount"
)
MANY = (
    "{} processes, but only 16 microbatches (batch.global_size=64 / batch.micro_size=4): start at most 16 processes, "
    "lower batch.micro_size or raise batch.global_size"
)
UNSOLD = (
    "no cloud of SkyPilot's list has machines with so many: take L4:1 or L4:2 or L4:4 or L4:8, or name the cloud that "
    "has them: --infra CLOUD"
)
REFUSED = {
    "train.yaml": f"without RUN_DIR the run is in {DISKS.format(2)}",
    "train-rdzv.yaml --gpus none": f"without RUN_DIR the run is in {DISKS.format(2)}",
    "train.yaml --num-nodes 4 --env RUN_DIR=runs/a": f"run.dir=runs/a is {DISKS.format(4)}",
    f"{SHARED} --env OVERRIDES=run.dir=runs/b": f"run.dir=runs/b is {DISKS.format(2)}",
    "train-spot.yaml": "BUCKET is required, and recipes/train-spot.yaml has no default: --env BUCKET=s3://bucket/runs",
    "train-spot.yaml --num-nodes 1 --env BUCKET=runs": f"run.dir=runs/sky-check is {MOVES}",
    "train-spot.yaml --env BUCKET=": f"without BUCKET the run is in {MOVES}",
    "train-bucket.yaml": (
        "BUCKET_NAME is required, and recipes/train-bucket.yaml has no default: --env BUCKET_NAME=my-runs"
    ),
    "train-bucket.yaml --env BUCKET_NAME=": "BUCKET_NAME=: give the name alone, such as my-runs",
    "train-bucket.yaml --env BUCKET_NAME=s3://b/x": "BUCKET_NAME=s3://b/x: give the name alone, such as my-runs",
    "serve.yaml --env RUN_DIR=s3://b/a": (
        "MINGPT_SERVE_KEY is required, and recipes/serve.yaml has no default: --secret MINGPT_SERVE_KEY"
    ),
    f"{SHARED} --num-nodes 8 --gpus L4:4": f"--num-nodes 8 with L4:4: {MANY.format(32)}",
    f"{SHARED} --env NPROC_PER_NODE=9": f"--num-nodes 2 with NPROC_PER_NODE=9: {MANY.format(18)}",
    f"{SHARED} --env NPROC_PER_NODE=gpu": "NPROC_PER_NODE=gpu: give a number from 1, or leave it out",
    f"{SHARED} --env NPROC_PER_NODE=0": "NPROC_PER_NODE=0: give a number from 1, or leave it out",
    f"{SHARED} --gpus L4:3": f"--gpus L4:3: {UNSOLD}",
    f"{SHARED} --gpus L4:two": "--gpus L4:two: give NAME:NUMBER, such as L4:1, or none",
    f"{SHARED} --num-nodes 0": "--num-nodes 0: give a number from 1",
    f"{SHARED} --env OVERRIDE=seed=2": "--env OVERRIDE: recipes/train.yaml does not read it: write OVERRIDES",
    f"{SHARED} --env =x": "--env =x: a name is missing: give --env NAME=VALUE",
    f"{SHARED} --secret NOT_THERE": (
        "--secret NOT_THERE: it is not set in this shell: export it, or write --secret NOT_THERE=…"
    ),
    f"{SHARED} --env OVERRIDES=--help": "OVERRIDES: --help is an option, and overrides are key=value: leave it out",
    f"{SHARED} --env-file .env": ".env: files of variables are not read here: give --env NAME=VALUE and --secret NAME",
    f"{SHARED} --env OVERRIDES='optimizer.lrr=1 seed=2'": "optimizer.lrr is not a key (did you mean optimizer.lr?)",
}
DOCUMENTS = [ROOT / "README.md", ROOT / "docs/skypilot.md", *sorted((ROOT / "recipes").glob("*.yaml"))]
LAUNCH = re.compile(r"sky (?:jobs launch|launch|serve up) ((?:[^\n`]|\\\n)*recipes/\S+\.yaml(?:[^\n`\\]|\\\n(?:# )?)*)")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(ROOT)
    with patch.dict(os.environ):
        yield


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_work_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sky_check_command(shlex.split(f"recipes/{command}")) == 64
    assert capsys.readouterr() == ("", f"error: {REFUSED[command]}\n")


def test_all_problems_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--num-nodes 40 --gpus L4:3 --env EXPERIMENT=nope --env RUNDIR=s3://b/a --env OVERRIDES=model.n_layr=2"
    assert sky_check_command(["recipes/train.yaml", *given.split()]) == 64
    told = capsys.readouterr().err
    assert told.startswith("error: 6 problems:\n")
    for words in ("write RUN_DIR", "L4:3: no cloud", "there are 40 nodes", "no experiment 'nope'", "model.n_layr is"):
        assert words in told
    assert "--num-nodes 40 with L4:3: 120 processes, but only " in told


@pytest.mark.parametrize(
    ("command", "verb"),
    [
        ("train.yaml --env RUN_DIR=runs/a --infra slurm", "launch"),
        ("train.yaml --env RUN_DIR=/mnt/shared/a", "launch"),
        ("train.yaml --num-nodes 1 --gpus none -c one -y", "launch"),
        ("train-bucket.yaml --env BUCKET_NAME=my-runs", "launch"),
        ("evaluate.yaml", "launch"),
        ("train-spot.yaml --env BUCKET=s3://b/runs -n x", "jobs launch"),
        ("serve.yaml --env RUN_DIR=s3://b/a --secret MINGPT_SERVE_KEY=k", "serve up"),
    ],
)
def test_what_can_work_is_answered_with_the_command(
    command: str, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sky_check_command(f"recipes/{command}".split()) == 0
    shown = command.replace("KEY=k", "KEY=***")
    shown = shown if "***" not in shown else shown.replace("MINGPT_SERVE_KEY=***", "'MINGPT_SERVE_KEY=***'")
    assert capsys.readouterr() == (f"nothing found\nsky {verb} recipes/{shown}\n", "")


def test_gpus_that_the_table_lacks_are_only_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    for given, what in ((["--gpus=B300:4"], "B300:4"), (["--gpus=L4:3", "--infra=runpod"], "L4:3 on runpod")):
        assert sky_check_command(["recipes/train.yaml", "--num-nodes=1", *given]) == 0
        assert capsys.readouterr().err == f"{what}: sky-check does not know in which numbers it is sold\n"


@pytest.mark.parametrize(
    ("text", "told"), [(None, "No such file or directory"), ("a: [", "can't read"), ("- a", "can't read")]
)
def test_a_file_that_is_no_recipe(
    text: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.yaml"
    if text is not None:
        file.write_text(text)
    assert sky_check_command([str(file)]) == 64
    error = capsys.readouterr().err
    assert error.startswith(f"error: {file}: ")
    assert told in error
    assert "give a recipe such as recipes/train.yaml" in error


def documented() -> list[str]:
    """The launching commands of the documents, on one line each."""
    found = [found for file in DOCUMENTS for found in LAUNCH.findall(file.read_text())]
    return list(dict.fromkeys(re.sub(r"\\\n(# )?\s*", "", text).strip() for text in found))


def test_documents_are_found() -> None:
    assert len(documented()) > 15


@pytest.mark.parametrize("text", documented())
def test_each_documented_command_passes(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "MINGPT_SERVE_KEY"):
        monkeypatch.setenv(name, "k")
    assert sky_check_command(shlex.split(text)) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_skypilots_own_options_are_known() -> None:
    sky = ROOT / ".venv-sky/bin/python"
    if not sky.exists():
        pytest.skip("needs SkyPilot in .venv-sky: make .venv-sky/.installed")
    code = (
        "from sky.client.cli import command as c\n"
        "for p in (*c.launch.params, *c.jobs_launch.params, *c.serve_up.params):\n"
        "    for o in (*p.opts, *p.secondary_opts):\n"
        "        print(o, getattr(p, 'is_flag', False) and o != '--docker')"
    )
    done = subprocess.run([sky, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    asked = {line.split()[0]: line.endswith("True") for line in done.stdout.splitlines() if line.startswith("-")}
    known = {name for action in parser()._actions for name in action.option_strings}
    assert asked.keys() <= known
    assert {name for name, flag in asked.items() if flag} | {"--docker"} >= set(FLAGS.split())
    assert not [name for name in VALUES.split() if asked.get(name)]


def test_as_a_program_of_its_own() -> None:
    command = [sys.executable, "-m", "mingpt.commands.sky_check", "recipes/train.yaml", "--num-nodes", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout == "nothing found\nsky launch recipes/train.yaml --num-nodes 1\n", done.stderr
