"""What an attempt says and agrees on before its first step."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mingpt.data.opening import open_data
from mingpt.data.vocabulary import Bytes
from mingpt.errors import UserError
from mingpt.snapshot import attempts
from mingpt.snapshot.attempts import make_run_dir, this_process
from mingpt.train.agreeing import agree_on_inputs
from mingpt.train.claiming import another_running
from mingpt.world.world import World
from tests.kits.config_kit import configured
from tests.kits.own_kit import CLASSIFIER
from tests.kits.report_kit import Made
from tests.kits.snapshot_kit import ALONE
from tests.kits.told import Told

SECRET = "health.notify=https://host/hunter"


@pytest.mark.parametrize(
    ("mine", "theirs", "others", "told"),
    [
        # Where a node has the data is its own affair; all else must be equal.
        ("", "data.workers=2", {}, ""),
        ("", "data.path=/x", {}, ""),
        ("", "run.dir=/x", {}, r".*run\.dir: "),
        ("", "train.log_every=3", {}, r".*train\.log_every: "),
        ("", "data.tokens=byte", {}, r".*data\.tokens: "),
        ("", "", {"sha256": "b"}, r".*data\.sha256: "),  # the same path, other content
        ("", "", {"vocabulary": Bytes()}, r".*data\.vocabulary: "),  # of data.tokenizer, a node's own place, too
        # A secret must be equal, and is not told.
        (f"{SECRET}2", f"{SECRET}3", {}, r"health\.notify: start"),
        (f"{SECRET}2", f"{SECRET}3 seed=2", {}, "seed: 1 -> 2: start"),
    ],
)
def test_all_processes_must_have_the_same_settings_and_data(
    mine: str, theirs: str, others: dict[str, Any], told: str
) -> None:
    said = list[Any]()

    class Recorder(World):
        def gather(self, value: Any) -> list[Any]:
            said.append(value)
            return said

    world = Recorder(**{f: getattr(ALONE, f) for f in ("rank", "size", "local_rank", "device", "backend")})
    config = configured(*CLASSIFIER)
    source = replace(open_data(config.data, config.model.block_size, config.batch.micro_size), sha256="a")
    agree_on_inputs(world, configured(*mine.split()), source)
    with pytest.raises(UserError, match=f"process 1 .* process 0: {told}") if told else nullcontext() as error:
        agree_on_inputs(world, configured(*theirs.split()), replace(source, **others))
    assert not error or "hunter" not in str(error.value)


@pytest.mark.parametrize("place", ["/", "file:///", "/tmp/..", "/proc/x"])
def test_a_place_that_is_no_runs_directory(place: str, told: Told) -> None:
    with told.mistake():
        make_run_dir(place)


# --- another attempt that may be running ---


@pytest.fixture
def other() -> "Iterator[subprocess.Popen[bytes]]":
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def claimed_by(folder: Path, pid: int, /, **changed: object) -> str:
    """A run whose attempt 1 another process has claimed; until: when it was seen last. Returns run.dir=…"""
    made = Made(folder).attempt(1, 0, 3)
    end, until = changed.pop("end", None), changed.pop("until", time.time())
    account = json.loads((path := made.folder / "ledger/attempt-00001.json").read_text())
    path.write_text(json.dumps(account | {"end": end, "until": until}))
    claim = json.loads((path := made.folder / "attempts/00001.json").read_text())
    process = this_process() | {"pid": pid, "started": attempts._started(pid)}
    path.write_text(json.dumps(claim | {"process": process | changed}))
    return f"run.dir={folder}"


def test_a_run_that_trains_on_this_machine_is_not_taken_over_unawares(
    other: "subprocess.Popen[bytes]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mingpt.train.claiming.DYING_SECONDS", 0.1)
    place = claimed_by(tmp_path, other.pid)
    with pytest.raises(UserError, match=rf"attempt 1 .*pid {other.pid}, .*resume\.take_over=true"):
        another_running(configured(place))
    assert f"pid {other.pid}" in another_running(configured(place, "resume.take_over=true"))
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # its parent has not asked for it: a zombie
    assert another_running(configured(place)) == ""


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"started": "1"}, ""),  # the pid is another process's by now
        ({"end": "finished"}, ""),
        ({"launcher": "mine"}, ""),  # which has started this process in its place
        ({"machine": "another"}, "seems to be running"),  # or another container of this one
        ({"machine": "another", "until": 1.0}, ""),
        ({"pid": "../1"}, "seems to be running"),
        ({"pid": "1\nfinished"}, "pid 1\\nfinished"),  # a stranger's
    ],
)
def test_who_takes_over_says_so_only_if_it_may_be_so(
    changed: dict[str, object],
    words: str,
    other: "subprocess.Popen[bytes]",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "mine")
    place = claimed_by(tmp_path, other.pid, **{"launcher": "", **changed})
    said = another_running(configured(place))
    assert words in said
    assert bool(words) == bool(said)
