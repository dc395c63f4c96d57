"""Curves: a run of two attempts is one curve in each tracker, read back by the tracker's own reader."""

import json
import re
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace as Served
from typing import Any
from uuid import uuid4

import fsspec
import numpy as np
import pytest

from mingpt.errors import CRASHED
from mingpt.observe import background, events, trackers
from mingpt.observe.events import (
    AttemptEnded,
    AttemptFailed,
    Evaluated,
    Event,
    Observer,
    Sampled,
    StepDone,
    StepSkipped,
)
from mingpt.observe.runfile import RunFile
from mingpt.observe.trace import Trace
from mingpt.observe.trackers import GROUPS, About, Trackers, tag
from tests.kits.config_kit import configured, problems
from tests.kits.hook_kit import hook
from tests.kits.node_kit import wait_until
from tests.kits.paths_kit import ROOT
from tests.kits.told import Told

ID = "0123456789abcdef0123456789abcdef"
FIRST, START, LAST = 12, 8, 16  # the first attempt ends after 12 steps, the second one goes on from 8


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


def about(run_dir: str, attempt: int, start: int, lr: float = 0.01) -> About:
    config = {"seed": 1, "optimizer": {"lr": lr, "betas": [0.9, 0.95]}, "data": {"token": "***"}}
    return About(ID, "a-run", run_dir, attempt, start, config, print)


def published(first: int, last: int) -> list[Event]:
    """What an attempt publishes. Step 5 is skipped: its norm is no number."""
    events = list[Event]()
    for step in range(first, last + 1):
        loss, norm = 1 / 3 + 1 / step, float("nan") if step == 5 else 2.0 * step
        events.append(StepDone(step, loss, norm, lr=0.01, tokens_seen=9 * step))
        if step == 5:
            events.append(StepSkipped(step, loss, norm, 1, False, (), ()))
        if step % 8 == 0:
            events.append(Evaluated(step, loss + 1, 0.5, 1, 4, {"web": loss}, 2.5))
            events.append(Sampled(step, f"the king\n{step}"))
    return [*events, AttemptEnded(last, last == LAST, None)]


def train(names: list[str], run_dir: str, attempt: int, start: int, end: int, lr: float = 0.01) -> None:
    curves = Trackers(names, about(run_dir, attempt, start, lr), print)
    observers: tuple[Observer, ...] = (Trace(run_dir, attempt, print), curves)
    for observer in observers:
        for event in published(start + 1, end):
            observer.on(event)


Curves = dict[str, list[tuple[int, Any]]]


def of_tensorboard(run_dir: str) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(run_dir, {"scalars": 0, "tensors": 0})
    events.Reload()
    sample = "train/sample/text_summary"
    texts = events.Tensors(sample) if sample in events.Tags()["tensors"] else []
    found: Curves = {"train/sample": [(e.step, e.tensor_proto.string_val[0].decode()) for e in texts]} if texts else {}
    return found | {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def wandb_records(run_dir: str) -> Iterator[Any]:
    """What W&B has written offline: its files are LevelDB's logs of its own messages."""
    from wandb.proto import wandb_internal_pb2 as messages

    for path in sorted(Path(run_dir, "wandb/wandb").glob("offline-run-*/*.wandb")):
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


def of_wandb(run_dir: str) -> Curves:
    curves: Curves = defaultdict(list)
    for record in wandb_records(run_dir):
        for item in record.history.item:
            curves[item.key or item.nested_key[0]].append((record.history.step.num, json.loads(item.value_json)))
    return {key: values for key, values in curves.items() if not key.startswith("_")}


def mlflow_run(run_dir: str) -> tuple[Any, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"file:{run_dir}/mlflow")
    experiment = client.get_experiment_by_name("mingpt")
    assert experiment
    [run] = client.search_runs([experiment.experiment_id])
    return client, run


def of_mlflow(run_dir: str) -> Curves:
    client, run = mlflow_run(run_dir)
    assert (run.info.run_name, run.data.params["optimizer.lr"]) == ("a-run", "0.01")
    return {k: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, k)] for k in run.data.metrics}


def of_trackio(run_dir: str) -> Curves:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    [run] = trackio.Api().runs("mingpt")
    assert (run.config or {})["optimizer.lr"] == 0.01
    curves: Curves = defaultdict(list)
    for row in SQLiteStorage.get_logs("mingpt", run.name):
        for key in row.keys() - {"step", "timestamp"}:
            curves[key].append((row["step"], row[key]))
    return curves


READERS = {"tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio}


def ends(run_dir: str) -> tuple[str, int]:
    """How the newest attempt ended: MLflow's status of the run, W&B's exit code."""
    attempts = len(list(Path(run_dir, "wandb/wandb").glob(f"offline-run-*-{ID}")))

    def codes() -> list[int]:
        return [record.exit.exit_code for record in wandb_records(run_dir) if record.HasField("exit")]

    wait_until(lambda: len(codes()) == attempts, "the last record")  # W&B's own process writes it
    return mlflow_run(run_dir)[1].info.status, codes()[-1]


@pytest.mark.slow
def test_a_run_of_several_attempts_is_one_curve_everywhere(tmp_path: Path) -> None:
    """All four in one test: each takes seconds to import."""
    run_dir, names, failed = f"{tmp_path}/run", list(trackers.TRACKERS), f"{tmp_path}/failed"
    Trackers(names, about(failed, 1, 0), print).on(AttemptFailed(1, CRASHED, "RuntimeError", "gone"))
    assert ends(failed) == ("FAILED", 1)
    train(names, run_dir, 1, 0, FIRST)
    assert ends(run_dir) == ("KILLED", 1)  # stopped
    time.sleep(1.1)  # W&B names a folder by the second
    train(names, run_dir, 2, START, LAST)
    assert ends(run_dir) == ("FINISHED", 0)
    defined = {(r.metric.name, r.metric.summary.min) for r in wandb_records(run_dir) if r.HasField("metric")}
    assert ("val/loss", True) in defined
    expected: Curves = defaultdict(list)
    for event in published(1, LAST):
        if isinstance(event, StepDone | Evaluated):
            for key, value in event.curves.items():
                if value == value:  # not the norm that is no number
                    expected[tag(key)].append((event.step, value))
    expected["train/skipped_in_a_row"] = [(5, 1)]
    for name in names:
        small: Callable[[float], Any] = np.float32 if name == "tensorboard" else float
        known: Curves = {key: [(step, float(small(value))) for step, value in v] for key, v in expected.items()}
        mark = {"tensorboard": "    ", "wandb": ""}.get(name)  # the others show no text
        if mark is not None:
            known["train/sample"] = [(step, f"{mark}the king\n{mark}{step}") for step in (8, 16)]
        assert READERS[name](run_dir) == known, name


def test_each_figure_has_one_tag_which_the_page_names() -> None:
    rows = dict(re.findall(r"^\| `([\w/]+)` \| `(\w+/\w+)` \|", (ROOT / "docs/observe.md").read_text(), re.M))
    assert rows.pop("val_loss/NAME") == tag("val_loss/NAME")
    assert rows == {name: tag(name) for names in GROUPS.values() for name in names}
    figures = {**StepDone(1, 2.0, 1.0, mfu=0.5).curves, **Evaluated(1, 2.0, 2.0, 1, 4, {}, 2.5).curves}
    assert {*figures, "skipped_in_a_row", "sample"} == rows.keys()


def test_tensorboards_own_tables_name_a_run_by_its_folder_and_compare_its_settings(tmp_path: Path) -> None:
    """What its pages show of `--logdir runs`, by its own server, of a run of two attempts and of another run."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.hparams.backend_context import Context

    for name, lr in (("a", 0.01), ("b", 0.02)):
        train(["tensorboard"], f"{tmp_path}/runs/{name}", 1, 0, FIRST, lr)
        train(["tensorboard"], f"{tmp_path}/runs/{name}", 2, START, LAST, lr)
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(f"{tmp_path}/runs")
    multiplexer.Reload()
    assert sorted(multiplexer.Runs()) == ["a", "b"]
    ours, table = RequestContext(), Context(Served(data_provider=MultiplexerDataProvider(multiplexer, "")))
    found = table.experiment_from_metadata(ours, "", True, table.hparams_metadata(ours, ""), [])
    settings = {i.name: (i.differs, i.domain_interval) for i in found.hparam_infos}
    assert {name: differs for name, (differs, _) in settings.items()} == {
        "optimizer.lr": True, "optimizer.betas": False, "seed": False, "data.token": False
    }  # fmt: skip
    rates = settings["optimizer.lr"][1]
    assert (rates.min_value, rates.max_value) == (0.01, 0.02)
    assert {("", "train/loss"), ("", "val/loss")} <= {(i.name.group, i.name.tag) for i in found.metric_infos}


# Curves of one step, from a process of its own: W&B reads the command line, and looks for a key, once in a process.
WANDB = f"""
from mingpt.observe import trackers
with trackers.wandb(trackers.About({ID!r}, "a-run", ".", 1, 0, {{}}, print)) as write:
    write((1, {{"loss": 1.0}}))
"""


@pytest.mark.slow
def test_wandb_gets_no_secret_of_the_command_line(tmp_path: Path) -> None:
    arguments = ["health.notify=http://127.0.0.1:1/SECRET77", "seed=4242424242"]
    subprocess.run([sys.executable, "-c", WANDB, *arguments], cwd=tmp_path, check=True, timeout=600)
    written = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any(name.endswith(".wandb") for name in written)
    assert not [name for name, raw in written.items() if b"SECRET77" in raw or b"4242424242" in raw]


def test_in_a_bucket_tensorboard_has_all_and_its_files_do_not_grow_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "PART_ROWS", 6)  # the longer attempt has three files
    monkeypatch.setattr(RunFile, "finish", lambda _: None)  # a thread that had no turn to upload before the end
    run_dir = f"memory://trackers-{uuid4().hex}/run"
    train(["tensorboard"], run_dir, 1, 0, FIRST)
    train(["tensorboard"], run_dir, 2, START, LAST)
    fsspec.filesystem("memory").get(f"{run_dir}/", f"{tmp_path}/", recursive=True)
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) > 4
    losses = [(step, float(np.float32(1 / 3 + 1 / step))) for step in range(1, LAST + 1)]
    assert of_tensorboard(str(tmp_path))["train/loss"] == losses


def test_a_tracker_or_server_that_does_not_answer_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's own client, which asks a server that keeps silent; then the queue is full."""
    monkeypatch.setattr(background, "MOST_WAITING", 3)
    monkeypatch.setattr(trackers, "END_SECONDS", 0.5)
    monkeypatch.setattr(trackers, "OPEN_SECONDS", 0.0)
    said: list[str] = []
    with hook(silent=True) as there:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", there.url.rpartition("/services")[0])
        curves = Trackers(["mlflow"], about("nowhere", 1, 0), said.append)
        for step in range(1, 10):
            curves.on(StepDone(step, 2.0, 1.0))
        curves.on(AttemptEnded(9, True, None))
    assert said == [
        "track=mlflow does not keep up: what comes now is left out. The run goes on.",
        "track=mlflow did not open in time: it got nothing of this attempt",
    ]


def test_a_finished_run_waits_for_a_tracker_that_opens_late(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, rows, said = threading.Event(), list[trackers.Row](), list[str]()

    @contextmanager
    def late(about: About) -> Iterator[trackers.Write]:
        opening.wait()
        monkeypatch.setattr(trackers, "END_SECONDS", 60.0)
        yield rows.append

    monkeypatch.setitem(trackers.TRACKERS, "wandb", late)
    for module, limit in ((events, "FIRST_SECONDS"), (events, "LIMIT_SECONDS"), (trackers, "END_SECONDS")):
        monkeypatch.setattr(module, limit, 0.0)  # the last one until it has opened
    observers = events.Observers([Trackers(["wandb"], about("nowhere", 1, 0), said.append)], said.append)
    observers.publish(StepDone(1, 2.0, 1.0))
    threading.Timer(0.1, opening.set).start()
    observers.publish(AttemptEnded(1, True, None))
    assert (len(rows), said) == (1, [])


def test_what_is_wrong_with_trackers_is_reported_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    told(problems("track=[tensorbord,wandb]", "seed=x"))
    monkeypatch.delenv("TRACKIO_DIR")
    told(problems("track=[wandb,mlflow,trackio]", "run.dir=s3://bucket/run"))
    for local in (f"file://{tmp_path}/run", f"{tmp_path}/a:b"):
        assert configured("track=[mlflow,trackio]", f"run.dir='{local}'").run.dir == local
    monkeypatch.setitem(sys.modules, "wandb", None)  # Python's way to say that there is none
    told(problems("track=[wandb,mlflow]"))
    assert configured("track=[]").track == []


@pytest.fixture
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing by which W&B would find a key."""
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC", "WANDB_LOGIN_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


KEY = "0" * 40


@pytest.mark.parametrize(
    ("found", "there"),
    [  # variables and files
        (True, {"WANDB_API_KEY": KEY}),
        (True, {"WANDB_IDENTITY_TOKEN_FILE": "token"}),
        (True, {"WANDB_MODE": "offline"}),
        (True, {".netrc": f"machine api.wandb.ai login user password {KEY}"}),
        (True, {"keys": f"machine wandb.corp.example login user password {KEY}", "NETRC": "keys"}),
        (True, {".config/wandb/settings": "[default]\nmode = offline\n"}),
        (True, {"wandb/settings": "[default]\nmode = offline\n"}),
        (False, {"HOME": ""}),  # as in a container whose user has no entry in /etc/passwd
        (False, {"WANDB_MODE": "online"}),
        (False, {".netrc": "machine github.com login user password x"}),
    ],
)
def test_wandb_without_a_key_is_a_mistake_before_anything_starts(
    found: bool, there: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_login: None
) -> None:
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    for name, value in there.items():
        if not value:
            monkeypatch.delenv(name)
        elif name.isupper():
            monkeypatch.setenv(name, value)
        else:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(value)
    if not found:
        [problem] = problems("track=[wandb]")
        assert problem.startswith("track=wandb: ")
        assert all(name in problem for name in ("WANDB_API_KEY", "WANDB_MODE=offline"))
        monkeypatch.setenv("RANK", "1")  # the first process alone writes curves
    assert configured("track=[wandb]").track == ["wandb"]


@pytest.mark.slow
def test_wandb_asks_no_question_in_a_terminal(in_terminal: Callable[..., tuple[int, str]], no_login: None) -> None:
    """Where its own search finds less than ours."""
    code, said = in_terminal([sys.executable, "-c", WANDB])
    assert code == 1
    assert "choice" not in said
    assert "API key" in said
