"""What an attempt says and agrees on before its first step."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config_kit import configured
from mingpt.compute.batches import BatchPlan
from mingpt.config.schema import Config
from mingpt.data.source import Source
from mingpt.data.vocabulary import Bytes
from mingpt.errors import UserError
from mingpt.snapshot import attempts
from mingpt.snapshot.attempts import make_run_dir, this_process
from mingpt.train.attempt import agree_on_inputs
from mingpt.train.proportions import count, proportions
from mingpt.train.session import another_running
from mingpt.world.world import World
from own_kit import CLASSIFIER
from report_kit import Made
from run_kit import train
from snapshot_kit import ALONE


def source_of(config: Config) -> Source:
    return config.data.open(config.model.block_size, config.batch.micro_size)


def agree(mine: Config, theirs: Config, sha256: str, **others: Any) -> None:
    said: list[Any] = []

    class Recorder(World):
        def gather(self, value: Any) -> list[Any]:
            said.append(value)
            return said

    world = Recorder(**{f: getattr(ALONE, f) for f in ("rank", "size", "local_rank", "device", "backend")})
    source = source_of(configured(*CLASSIFIER))
    for config, changed in ((mine, {"sha256": "a"}), (theirs, {"sha256": sha256} | others)):
        agree_on_inputs(world, config, replace(source, **changed))


@pytest.mark.parametrize(
    "setting",
    ["data.workers=2", "data.cache_dir=/scratch", "data.path=/local/text.txt", "data.cache_timeout_seconds=9"],
)
def test_where_a_node_has_the_data_is_its_own_affair(setting: str) -> None:
    agree(configured(), configured(setting), "a")


@pytest.mark.parametrize(
    "setting", ["run.dir=/other", "data.stride=2", "seed=2", "train.log_every=3", "data.tokens=byte"]
)
def test_all_else_must_be_equal(setting: str) -> None:
    with pytest.raises(
        UserError, match=f"process 1 has other settings or data than process 0: .*{setting.split('=')[0]}: "
    ):
        agree(configured(), configured(setting), "a")


def test_the_same_path_with_other_content_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"process 1 has other settings or data than process 0: data\.sha256: a -> b: start all "
    ):
        agree(configured(), configured(), "b")


def test_another_vocabulary_of_the_same_text_is_refused() -> None:
    """data.tokenizer is a node's own place, as data.path is: what lies there must be the same."""
    with pytest.raises(UserError, match=r"than process 0: data\.vocabulary: \w+ -> \w+: start all "):
        agree(configured(), configured(), "a", vocabulary=Bytes())


def lines(samples: int, *arguments: str) -> list[str]:
    config = configured(*CLASSIFIER, "batch.global_size=64", "batch.micro_size=8", *arguments)
    plan = BatchPlan(samples, 1, config.batch.global_size, config.batch.micro_size)
    return list(proportions(plan, source_of(config), config))


def test_the_start_tells_how_often_the_data_is_seen() -> None:
    every = "every 250 steps (train.eval_batches)"
    assert lines(3687, "train.max_steps=300") == [
        "data: 3,686 samples, 64 a step, 5.2 epochs",
        f"validation: all 52 microbatches {every}",
    ]
    assert lines(3687, "train.max_steps=9000")[:2] == [
        "data: 3,686 samples, 64 a step, 156 epochs",
        "WARNING: 156 epochs: a model that sees its data so often learns it by heart: take more data, or lower "
        "train.max_steps",
    ]


def test_a_warm_up_longer_than_the_run_is_told() -> None:
    assert lines(3687, "train.max_steps=6")[1:] == [
        "validation: the first 16 of 52 microbatches every 250 steps (train.eval_batches)",
        "WARNING: schedule.warmup_steps=100, but train.max_steps=6: the learning rate never reaches optimizer.lr",
    ]


def test_of_a_text_tokens_are_told(text: Any, cache: Any) -> None:
    config = configured(
        f"data.path={text}",
        f"data.cache_dir={cache}",
        "model.block_size=16",
        "batch.global_size=32",
        "train.max_steps=106",
    )
    plan = BatchPlan(5384, 1, 32, 16)
    assert next(proportions(plan, source_of(config), config)) == "data: 5,400 tokens, 512 a step, 10.1 epochs"
    assert [count(n) for n in (999_999, 1_000_000, 9_960_000_000)] == ["999,999", "1.0 M", "10.0 G"]


@pytest.mark.parametrize("place", ["/", "//", "file:///", "/tmp/.."])
def test_the_root_of_a_file_system_is_no_runs_directory(place: str) -> None:
    with pytest.raises(UserError, match=r"^run\.dir=.*: this is the root of the file system: give a folder of its own"):
        make_run_dir(place)


def test_a_place_where_no_folder_can_be_made_is_not_called_misspelt() -> None:
    with pytest.raises(
        UserError, match=r"^run\.dir=/proc/x: this folder can't be created there: choose another place$"
    ):
        make_run_dir("/proc/x")


@pytest.mark.slow
def test_who_wants_to_resume_and_finds_no_snapshot_is_told(tmp_path: Path) -> None:
    run = ("data=addition", "model=gpt-nano", "batch.global_size=16", "run.dir=fork", "train.max_steps=1")
    done = train(tmp_path, *run, "resume.changed=true")
    warning = "WARNING: resume.changed=true, but there is no snapshot in fork/snapshots: this run starts at step 1\n"
    assert (done.returncode, done.stdout.count(warning)) == (0, 1), done.stderr
    again = train(tmp_path, *run, "resume.changed=true", "train.max_steps=2")
    assert (again.returncode, again.stdout.count("WARNING: resume")) == (0, 0), again.stderr
    root = train(tmp_path, "data=addition", "model=gpt-nano", "run.dir=/")
    assert (root.returncode, root.stderr[:17]) == (64, "error: run.dir=/:")


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
    other: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    place = claimed_by(tmp_path, other.pid)
    with pytest.raises(UserError, match=rf"attempt 1 \(\S+, pid {other.pid}, last seen .* resume\.take_over=true"):
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
        ({"machine": "another", "launcher": "mine"}, ""),  # there, too
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
