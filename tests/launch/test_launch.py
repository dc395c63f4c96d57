"""What mingpt.launch makes of options and platform variables, and which ending gives which exit code."""

import argparse
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from socket import gethostname

import pytest
import torch
import yaml
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from mingpt.cli.parsers import parse
from mingpt.cli.redact import redacted
from mingpt.compose.compose import configure
from mingpt.errors import CRASHED, SnapshotFailed, UserError
from mingpt.launch import agent
from mingpt.launch.ending import Ending
from mingpt.launch.torchrun import Command, Torchrun
from mingpt.world.env import START
from mingpt.world.failures import classify
from mingpt.world.lifetime import Lifetime, Phase, leave_reason
from mingpt.world.secret import SECRET
from tests.kits.config_kit import configured
from tests.kits.told import Told

COMMANDS = yaml.safe_load(Path(__file__).with_name("commands.yaml").read_text())
TRAINJOB = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "localhost"}


def compose(*arguments: str, environment: Mapping[str, str] | None = None) -> Command:
    node = Torchrun.compose(parse("launch", arguments), environment or {})
    config = configure(node.overrides, node.fewest_processes)
    return node.command(config)


@pytest.mark.parametrize("name", COMMANDS)
def test_options_and_variables_give_a_command(name: str) -> None:
    before, _, after = COMMANDS[name].partition(" -> ")
    words = [word.replace("\\n", "\n") for word in shlex.split(before)]
    given = words.index("launch")
    variables = dict(variable.split("=", 1) for variable in words[:given])
    command = str(compose("run.name=r", *words[given + 1 :], environment=variables))
    if name != "a password":
        command = re.sub("^TORCH.* torchrun | --max-restarts.* mingpt.train", "", command)
    assert str(redacted(command)).replace(START, "…") == after


def test_torchrun_itself_takes_none_of_these_variables_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TRAINJOB, "PET_STANDALONE": "1", "PET_NO_PYTHON": "1", "PET_RDZV_ID": "theirs"}.items():
        monkeypatch.setenv(name, value)
    taken: list[argparse.Namespace] = []

    def take(options: argparse.Namespace) -> None:
        taken.append(options)
        raise RuntimeError("enough")

    monkeypatch.setattr(agent.torchrun, "config_from_args", take)
    command = compose("--nproc-per-node=3", "run.name=r", "run.dir=s3://user:secret@bucket/r")
    assert "run.dir=s3://user:secret@bucket/r" in command.overrides
    assert "secret" not in " ".join(command.arguments)  # `ps` shows them to everybody
    older = ["--no-such-option=3", *command.arguments]  # one that only newer torchruns have
    assert agent.run(older, configured(), 0, print, Lifetime()) == (CRASHED, "RuntimeError: enough")
    (found,) = taken
    assert (found.nnodes, found.nproc_per_node, found.rdzv_backend) == ("1", "3", "mingpt-static")
    assert (found.rdzv_endpoint, found.rdzv_id) == ("127.0.0.1:0", "r")
    assert [found.standalone, found.no_python, found.run_path] == [False] * 3


def test_a_c10d_rendezvous_of_several_nodes_needs_a_secret() -> None:
    node = Torchrun.compose(parse("launch", ["--nnodes=1:2", "--rdzv-endpoint=127.0.0.1:29500"]), {})
    for environment in ({}, {SECRET: "short"}):
        with pytest.raises(UserError, match=f"^{SECRET} is "):
            node.check(environment)
    node.check({SECRET: "x" * 16})


# --- endings ---

LOST = (70, "lost contact with another process (Connection reset by peer)")


def test_the_first_reason_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file := tmp_path / "error.json"))
    leave_reason("the disk is full")
    leave_reason("lost contact")
    assert json.loads(file.read_text())["message"]["message"] == "the disk is full"


@pytest.mark.parametrize(
    ("ends", "asked", "code", "cause"),
    [
        ([], False, 0, None),
        ([LOST, (-9, "")], False, 70, 1),
        ([LOST, (64, "run.dir=/x: permission denied")], False, 64, 1),
        ([(75, ""), (-15, "")], False, 75, 0),
        ([(75, ""), (70, "OSError: y")], True, 70, 1),
        ([(-15, "")], True, 75, 0),
        ([(-15, "")], False, 70, 0),  # somebody else's signal, before it listened
        ([(1, "")], False, 70, 0),
    ],
)
def test_the_worst_and_first_cause_of_an_ending_has_the_word(
    ends: list[tuple[int, str]],
    asked: bool,
    code: int,
    cause: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: Told,
) -> None:
    failures = list[ProcessFailure]()
    for rank, (end, words) in enumerate(ends):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file := tmp_path / f"error-{rank}.json"))
        if words:
            leave_reason(words)
        failures.append(ProcessFailure(local_rank=rank, pid=1, exitcode=end, error_file=str(file)))
    ending = Ending.of(failures)
    assert ending.code(asked) == code
    if cause is not None:
        assert ending.reasons[0].startswith(f"process {cause} of {gethostname()}: ")
        told(ending.reasons[0], gethostname())


ERRORS: dict[str, tuple[Exception, int]] = {
    "of the user": (UserError("a", "b"), 64),
    "memory of a GPU": (torch.OutOfMemoryError("CUDA"), 70),
    "a peer": (RuntimeError("[/x/pair.cc:537] Read error [127.0.0.1]:5: Connection reset by peer. This is"), 70),
    "a peer's time": (RuntimeError("[/x/y.cc:7] Timed out waiting 3000ms"), 70),
    "a snapshot": (SnapshotFailed("the snapshot of step 3 …"), 70),
    "a loader": (RuntimeError("DataLoader worker (pid 5) is killed"), 70),
    # What a loader process raises is the user's code: not taken for torch's own errors, whatever its words.
    "a time in a loader": (TimeoutError("Caught TimeoutError in DataLoader worker process 0.\nhttps://u:p@h"), 70),
    "any other": (KeyError("x"), 70),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_says_what_to_do(name: str, told: Told) -> None:
    error, code = ERRORS[name]
    failure = classify(error, Phase.TRAINING)
    assert failure.code == code
    assert failure.trace == (" in a loader" in f" {name}" or name == "any other")
    told(failure.reason)
