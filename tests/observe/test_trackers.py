"""Curves: a run of two attempts is one curve in each tracker, read back by the tracker's own reader."""

import json
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import numpy as np
import pytest

from config_kit import configured, problems
from hook_kit import hook
from mingpt.config import checks
from mingpt.errors import CRASHED
from mingpt.observe import background, trackers
from mingpt.observe.background import Background
from mingpt.observe.events import (
    AttemptEnded,
    AttemptFailed,
    Evaluated,
    Event,
    Observer,
    StepDone,
    StepSkipped,
    TasksEvaluated,
)
from mingpt.observe.jsonl import read_metrics
from mingpt.observe.runfile import RunFile
from mingpt.observe.trace import Trace
from mingpt.observe.trackers import About, Trackers
from mingpt.snapshot.hot import find_run_id
from run_kit import Run

ID = "0123456789abcdef0123456789abcdef"
TOKEN = "cAnArY7f3a9c55"
FIRST, START, LAST = 12, 8, 16  # the first attempt ends after 12 steps, the second one goes on from 8
STEPS = list(range(1, LAST + 1))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, no account, and nothing that the trackers set in the environment stays there."""
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_LOGIN_TIMEOUT": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": "",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(trackers, "END_SECONDS", 240.0)


def about(run_dir: str, attempt: int, start: int) -> About:
    config = {"seed": 1, "optimizer": {"lr": 0.01}, "data": {"token": "***"}}
    return About(ID, "a-run", run_dir, attempt, start, config, print)


def loss(step: int) -> float:
    return 1 / 3 + 1 / step


def train(names: list[str], run_dir: str, attempt: int, start: int, end: int) -> None:
    """What an attempt publishes. Step 5 is skipped: its norm is no number."""
    observers: list[Observer] = [Trace(run_dir, attempt, print)]
    observers.append(Trackers(names, about(run_dir, attempt, start), print))
    for step in range(start + 1, end + 1):
        norm = float("nan") if step == 5 else 2.0 * step
        events: list[Event] = [StepDone(step, loss(step), norm, lr=0.01, tokens_seen=9 * step)]
        events += [StepSkipped(step, loss(step), norm, 1, False, (), ())] * (step == 5)
        events += [Evaluated(step, loss(step) + 1, 0.5, 1, 4, {"web": loss(step)}, 2.5)] * (step % 8 == 0)
        events += [TasksEvaluated(step, {"arc_easy/acc": 0.75})] * (step % 8 == 0)
        for observer in observers:
            for event in events:
                observer.on(event)
    for observer in observers:
        observer.on(AttemptEnded(end, end == LAST, None))


def of_tensorboard(run_dir: str) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(f"{run_dir}/tensorboard", {"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def wandb_records(run_dir: str) -> Iterator[Any]:
    """Its files are LevelDB's logs of its own messages."""
    from wandb.proto import wandb_internal_pb2 as messages

    for path in sorted(Path(run_dir, "wandb/wandb").glob(f"offline-run-*-{ID}/*.wandb")):
        raw, at, message = path.read_bytes(), 7, b""  # after the file's header
        while at + 7 <= len(raw):
            if 32768 - at % 32768 < 7:  # what is left of a block and can't hold a header
                at += 32768 - at % 32768
                continue
            length, kind = struct.unpack("<HB", raw[at + 4 : at + 7])
            message += raw[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last piece
                yield messages.Record.FromString(message)  # type: ignore[attr-defined]
                message = b""


def of_wandb(run_dir: str) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in wandb_records(run_dir):
        for item in record.history.item:
            key = item.key or item.nested_key[0]
            curves.setdefault(key, []).append((record.history.step.num, json.loads(item.value_json)))
    return {key: values for key, values in curves.items() if not key.startswith("_")}


def ends(run_dir: str) -> tuple[str, int]:
    """How the newest attempt ended: MLflow's status of the run, W&B's exit code."""
    attempts = len(list(Path(run_dir, "wandb/wandb").glob(f"offline-run-*-{ID}")))
    codes = list[int]()
    for _ in range(300):  # W&B's own process writes the last record
        codes = [record.exit.exit_code for record in wandb_records(run_dir) if record.HasField("exit")]
        if len(codes) == attempts:
            break
        time.sleep(0.1)
    return mlflow_run(run_dir).info.status, codes[-1]


def mlflow_run(run_dir: str) -> Any:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"file:{run_dir}/mlflow")
    experiment = client.get_experiment_by_name("mingpt")
    assert experiment
    [run] = client.search_runs([experiment.experiment_id])
    return run


def of_mlflow(run_dir: str) -> dict[str, list[tuple[int, float]]]:
    from mlflow.tracking import MlflowClient

    client, run = MlflowClient(f"file:{run_dir}/mlflow"), mlflow_run(run_dir)
    assert run.data.params["optimizer.lr"] == "0.01"
    assert run.info.run_name == "a-run"
    return {k: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, k)] for k in run.data.metrics}


def of_trackio(run_dir: str) -> dict[str, list[tuple[int, float]]]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    [run] = trackio.Api().runs("mingpt")
    assert run.config
    assert run.config["optimizer.lr"] == "0.01"
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in SQLiteStorage.get_logs("mingpt", run.name):
        for key in row.keys() - {"step", "timestamp"}:
            curves.setdefault(key, []).append((row["step"], row[key]))
    return curves


def test_a_run_of_two_attempts_is_one_curve_everywhere(tmp_path: Path) -> None:
    """All four in one test: each takes seconds to import."""
    run_dir, names = str(tmp_path / "run"), list(trackers.TRACKERS)
    train(names, run_dir, 1, 0, FIRST)
    assert ends(run_dir) == ("KILLED", 1)  # stopped
    time.sleep(1.1)  # W&B names a folder by the second
    train(names, run_dir, 2, START, LAST)
    assert ends(run_dir) == ("FINISHED", 0)
    for name in names:
        curves = globals()[f"of_{name}"](run_dir)
        small = (lambda x: float(np.float32(x))) if name == "tensorboard" else float
        assert curves["loss"] == [(step, small(loss(step))) for step in STEPS], name
        assert curves["grad_norm"] == [(step, 2.0 * step) for step in STEPS if step != 5], name
        assert curves["val_loss"] == [(step, small(loss(step) + 1)) for step in (8, 16)], name
        assert curves["val_accuracy"] == [(8, 0.25), (16, 0.25)], name
        assert curves["val_bits_per_byte"] == [(8, 2.5), (16, 2.5)], name
        assert curves["tasks/arc_easy/acc"] == [(8, 0.75), (16, 0.75)], name
        assert curves["skipped_in_a_row"] == [(5, 1)], name
        assert curves["tokens_seen"] == [(step, 9 * step) for step in STEPS], name
        assert curves.keys() - {"val_loss/web"} == StepDone(1, 2.0, 1.0).curves.keys() | {
            "val_loss",
            "val_accuracy",
            "val_bits_per_byte",
            "tasks/arc_easy/acc",
            "skipped_in_a_row",
        }, name


def test_a_failed_attempt_has_failed_in_the_trackers_too(tmp_path: Path) -> None:
    curves = Trackers(["wandb", "mlflow"], about(str(tmp_path), 1, 0), print)
    curves.on(AttemptFailed(1, CRASHED, "RuntimeError", "gone"))
    assert ends(str(tmp_path)) == ("FAILED", 1)


def test_wandb_gets_no_secret_of_the_command_line(tmp_path: Path) -> None:
    """A process of its own: W&B reads the command line once in a process."""
    lines = [
        "from mingpt.observe import trackers",
        f"about = trackers.About({ID!r}, 'a-run', {str(tmp_path)!r}, 1, 0, {{}}, print)",
        "with trackers.wandb(about) as write:",
        "    write((1, {'loss': 1.0}))",
    ]
    arguments = ["health.notify=http://127.0.0.1:1/SECRET77", "seed=4242424242"]
    subprocess.run([sys.executable, "-c", "\n".join(lines), *arguments], check=True, timeout=600)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in written)
    for path in written:
        assert b"SECRET77" not in path.read_bytes(), path
        assert b"4242424242" not in path.read_bytes(), path


def test_in_a_bucket_tensorboard_has_all_and_its_files_do_not_grow_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "PART_ROWS", 5)
    monkeypatch.setattr(RunFile, "finish", lambda _: None)  # a thread that had no turn to upload before the end
    run_dir = f"memory://trackers-{uuid4().hex}/run"
    train(["tensorboard"], run_dir, 1, 0, FIRST)
    train(["tensorboard"], run_dir, 2, START, LAST)
    memory = fsspec.filesystem("memory")
    memory.get(f"{run_dir}/tensorboard/", f"{tmp_path}/tensorboard/", recursive=True)
    assert len(list((tmp_path / "tensorboard").iterdir())) > 4
    assert of_tensorboard(str(tmp_path))["loss"] == [(step, float(np.float32(loss(step)))) for step in STEPS]


def test_a_real_run_writes_its_curves_where_tensorboard_is_installed(new_run: Callable[..., Run]) -> None:
    run = new_run("track=null", "train.max_steps=8")
    run.finish(1)
    shown = of_tensorboard(run.dir)["loss"]
    assert shown == [(row["step"], float(np.float32(row["loss"]))) for row in read_metrics(run.dir)]
    assert find_run_id(run.dir) is not None
    run = new_run("train.max_steps=2", name="without")
    run.finish(1)
    assert not Path(run.dir, "tensorboard").exists()


@contextmanager
def broken() -> Iterator[Callable[[int], None]]:
    def work(item: int) -> None:
        raise OSError(f"{item}: https://user:{TOKEN}@example.com/")

    yield work


def test_a_tracker_that_fails_is_reported_once_and_without_secrets() -> None:
    said: list[str] = []
    failing = Background[int]("track=x", broken, said.append)
    for item in (1, 2, 3):
        failing.put(item)
    failing.close(60)
    assert said == ["track=x failed: 1: https://***@example.com/. The run goes on."]


def test_a_tracker_that_blocks_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MOST_WAITING", 3)
    said: list[str] = []
    go_on, had = threading.Event(), list[int]()

    @contextmanager
    def stuck() -> Iterator[Callable[[int], None]]:
        go_on.wait()
        yield had.append

    blocked = Background[int]("track=x", stuck, said.append)
    for item in range(10):
        blocked.put(item)
    blocked.close(0.1)
    assert said == [
        "track=x does not keep up: what comes now is left out. The run goes on.",
        "track=x did not end in time: its last items may be lost",
    ]
    go_on.set()


def test_a_server_that_does_not_answer_holds_up_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(trackers, "END_SECONDS", 0.5)
    with hook(silent=True) as there:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", there.url.rpartition("/services")[0])
        curves = Trackers(["mlflow"], about(str(tmp_path), 1, 0), said.append)
        curves.on(StepDone(1, 2.0, 1.0))
        curves.on(AttemptEnded(1, True, None))
    assert said == ["track=mlflow did not end in time: its last items may be lost"]


def test_what_is_wrong_with_trackers_is_reported_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert problems("track=[tensorbord,wandb]", "seed=x") == [
        "seed='x': must be a valid integer",
        "track=tensorbord is not one of tensorboard, wandb, mlflow, trackio (did you mean tensorboard?)",
    ]
    monkeypatch.delenv("TRACKIO_DIR")
    assert problems("track=[wandb,mlflow,trackio]", "run.dir=s3://bucket/run") == [
        "track=mlflow can't write to a run.dir in a bucket: set MLFLOW_TRACKING_URI in the environment",
        "track=trackio can't write to a run.dir in a bucket: set TRACKIO_DIR or TRACKIO_SPACE_ID or TRACKIO_SERVER_URL "
        "in the environment",
    ]
    for local in (f"file://{tmp_path}/run", f"{tmp_path}/a:b"):
        assert configured("track=[mlflow,trackio]", f"run.dir='{local}'").run.dir == local
    monkeypatch.setitem(sys.modules, "wandb", None)  # Python's way to say that there is none
    assert problems("track=[wandb,mlflow]") == [
        "track=wandb: its package is not installed: pip install -e '.[wandb]' in the checkout"
    ]
    assert configured("track=[]").track == []


def test_a_folder_that_wandb_has_made_is_not_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "madeup").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not checks.installed("madeup")
    assert checks.installed("tensorboard")
