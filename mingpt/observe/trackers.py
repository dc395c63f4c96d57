"""Curves in TensorBoard, Weights & Biases, MLflow and trackio: a run is one curve there, over all its attempts.

Each tracker has a thread of its own, and is imported there. Steps that are computed again have the same bits:
TensorBoard forgets those it had, the others keep those. Secrets come from the environment only.
"""

import io
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

from mingpt.cli.console import Say
from mingpt.config.imports import installed
from mingpt.config.keys import leaves
from mingpt.config.schema import Config
from mingpt.files.folder import Folder
from mingpt.files.localfile import check_folder, check_tree
from mingpt.observe.background import Background
from mingpt.observe.events import (
    END_SECONDS,
    OPEN_SECONDS,
    AttemptEnded,
    AttemptFailed,
    Evaluated,
    Event,
    Sampled,
    StepDone,
    StepSkipped,
)
from mingpt.observe.runfile import RunFile
from mingpt.observe.trace import read_trace
from mingpt.snapshot.attempts import RunRecord
from mingpt.tiers.hot import run_id

PROJECT = "mingpt"  # where the environment names none
PART_ROWS = 4096  # of an event file: less than a megabyte
FINISHED, STOPPED, FAILED = "FINISHED", "KILLED", "FAILED"

# The figures of the metrics by the group that each is shown in, as everybody has them. The metrics keep plain names:
# users read the files of all versions.
GROUPS = {
    "train": ("loss", "lr", "grad_norm", "tokens_seen", "skipped_in_a_row", "sample"),
    "val": ("val_loss", "val_accuracy", "val_bits_per_byte", "val_tokens", "val_share"),
    "perf": ("tokens_per_second", "step_seconds", "seconds_left", "mfu"),
    "system": ("peak_memory", "world_size"),
}

Row = tuple[int, Mapping[str, Any]]  # step; numbers by tag, or a text
Write = Callable[[Row], None]


def tag(name: str) -> str:
    """What a figure of the metrics is called in a tracker: `loss` is `train/loss`, `val_loss/web` is `val/loss_web`."""
    figure = name.partition("/")[0]  # without the component of a mixture
    [group] = [group for group, figures in GROUPS.items() if figure in figures]
    # No second slash: MLflow's folder has a file `val/loss`, which can't be a folder, too.
    return f"{group}/{name.removeprefix('val_').replace('/', '_')}"


@dataclass
class About:
    """What a tracker gets to know of the run. id: the same in all attempts. start: steps done before this attempt.

    end: how the attempt ended, by MLflow's names; right when no more rows come.
    """

    id: str
    name: str
    run_dir: str
    attempt: int
    start: int
    config: dict[str, Any]
    say: Say
    end: str = FAILED

    def folder(self, name: str, links: bool = False) -> str:
        """A local folder for a tracker's files: in run.dir, or, if that is a bucket, one that is not kept.

        links: whether the tracker itself puts links into it. Else a stranger's would lead it elsewhere.
        """
        run = Folder(self.run_dir)
        if not run.local:
            return tempfile.mkdtemp(prefix=f"mingpt-{name}-")
        path = Path(run.path(name))
        with run.named_errors():
            (check_folder if links else check_tree)(str(path))
            path.mkdir(parents=True, exist_ok=True)
        return str(path)

    def settings(self) -> dict[str, bool | int | float | str | None]:
        """The config by key, such as `train.max_steps`; lists as text."""
        return {k: v if isinstance(v, (int, float, str, type(None))) else str(v) for k, v in leaves(self.config)}


def beyond(last: int, write: Write) -> Write:
    """`write` for the steps after `last`: the tracker has the others already."""
    return lambda row: write(row) if row[0] > last else None


@contextmanager
def tensorboard(about: About) -> Iterator[Write]:
    from tensorboard.compat.proto.event_pb2 import Event as Record
    from tensorboard.compat.proto.event_pb2 import SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter
    from torch.utils.tensorboard.summary import hparams
    from torch.utils.tensorboard.summary import text as of_text

    files = list[RunFile]()  # the last ones; a bucket gets each one as a whole, so it must not grow for ever
    rows = 0

    def add(**fields: Any) -> None:
        raw = io.BytesIO()
        RecordWriter(raw).write(Record(wall_time=time.time(), **fields).SerializeToString())
        files[-1].append(raw.getvalue())

    def write(row: Row) -> None:
        nonlocal rows
        if rows % PART_ROWS == 0:
            for file in files[-1:]:
                file.finish()
            del files[:-2]  # those that a bucket may not have yet stay
            # Readers sort the files by name. The clocks of two machines may differ, the numbers of attempts do not.
            # In run.dir itself, whose name is then that of the curve.
            name = f"events.out.tfevents.{about.attempt:010d}.{rows:010d}"
            files.append(RunFile(about.run_dir, name, about.say, "the event file of track=tensorboard"))
            add(file_version="brain.Event:2")
            if rows == 0:  # steps from this one on are forgotten, since this attempt computes them again
                add(step=about.start + 1, session_log=SessionLog(status=SessionLog.START))
                # Only the record with the values: of the one with a list of keys TensorBoard takes any run's for all,
                # and would show no others. It believes a run's first values.
                add(summary=hparams(about.settings(), {})[1])
        rows += 1
        step, values = row
        if text := values.get(tag("sample")):  # Markdown, in which indented lines stay as they are
            add(step=step, summary=of_text(tag("sample"), indent(text, "    ")))
        else:
            add(step=step, summary=Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in values.items()]))

    yield write
    for file in files:
        file.close()


@contextmanager
def wandb(about: About) -> Iterator[Write]:
    # Else it asks for a key at the terminal, where config/checks.py has found a trace of one.
    os.environ["WANDB_SILENT"] = "true"
    import wandb as client

    folder = os.environ.get("WANDB_DIR") or about.folder("wandb", links=True)
    before = list(Path(folder, "wandb").glob(f"offline-run-*-{about.id}"))
    run = client.init(
        project=os.environ.get("WANDB_PROJECT") or PROJECT,
        name=about.name,
        id=about.id,
        resume="allow",
        dir=folder,
        config=about.config,
        allow_val_change=True,
        # x_disable_meta: no command line, which may hold secrets, and nothing of the machine
        settings=client.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_meta=True),
    )
    run.define_metric(tag("val_loss"), summary="min,last")  # a table of runs shows both
    last = run.step - 1  # the server knows; offline, nobody does but the attempts before
    if run.offline and before:
        traces = read_trace(about.run_dir).items()
        last = max((int(found["step"].max(initial=0)) for n, found in traces if n < about.attempt), default=0)
    yield beyond(last, lambda row: run.log(dict(row[1]), step=row[0]))
    run.finish(exit_code=0 if about.end == FINISHED else 1)


@contextmanager
def mlflow(about: About) -> Iterator[Write]:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri or f"file:{about.folder('mlflow')}")
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
    found = client.get_experiment_by_name(name)
    experiment = found.experiment_id if found else client.create_experiment(name)
    runs = client.search_runs([experiment], f"tags.`mingpt.run_id` = '{about.id}'", max_results=1)
    if runs:
        id = runs[0].info.run_id
        client.update_run(id, "RUNNING")
    else:  # parameters can't be changed later; a resume's are in the snapshots' history
        id = client.create_run(experiment, tags={"mingpt.run_id": about.id}, run_name=about.name).info.run_id
        client.log_batch(id, params=[Param(key, str(value)[:500]) for key, value in about.settings().items()])
    before = client.get_metric_history(id, tag("loss")) if runs else []

    def write(row: Row) -> None:
        now, (step, values) = int(time.time() * 1000), row
        client.log_batch(id, metrics=[Metric(key, value, now, step) for key, value in values.items()])

    yield beyond(max((metric.step for metric in before), default=0), write)
    client.set_terminated(id, about.end)


@contextmanager
def trackio(about: About) -> Iterator[Write]:
    if not os.environ.get("TRACKIO_DIR"):
        os.environ["TRACKIO_DIR"] = about.folder("trackio")
    import trackio as client

    run = client.init(
        project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
        name=f"{about.name}-{about.id[:8]}",
        resume="allow",
        config=about.settings(),
        auto_log_cpu=False,
        auto_log_gpu=False,
        embed=False,
    )
    # trackio finds a run by its name and knows its last step, but says it nowhere else.
    yield beyond(run._next_step - 1, lambda row: run.log(dict(row[1]), step=row[0]))
    run.finish()


TRACKERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow, "trackio": trackio}


def open_trackers(config: Config, record: RunRecord, say: Say) -> "list[Trackers]":
    """The observer that hands the curves to config.track's trackers; none if there are none, or no id of the run."""
    names = list[str](config.track if config.track is not None else filter(installed, ["tensorboard"]))
    if not names or record.claim is None:
        return []
    try:
        id = run_id(config.run.dir)  # here: the hot tier asks for it in the same thread, and the first one creates it
    except Exception as error:
        say(f"track={','.join(names)}: {error}. The run goes on without.")
        return []
    plain = record.provenance["config"]  # without secrets, as a manifest has it
    about = About(id, config.run.name, config.run.dir, record.attempt, record.claim.record.from_step, plain, say)
    return [Trackers(names, about, say)]


class Trackers:
    def __init__(self, names: list[str], about: About, say: Say) -> None:
        self._about = about
        names = list(dict.fromkeys(names))
        self._all = {name: Background[Row](f"track={name}", partial(TRACKERS[name], about), say) for name in names}

    def on(self, event: Event) -> None:
        match event:
            case StepDone(logged=True) | Evaluated():
                self._put(event.step, **event.curves)
            case Sampled():
                # The others show no text.
                for name in {"tensorboard", "wandb"} & self._all.keys():
                    self._all[name].put((event.step, {tag("sample"): event.text}))
            case StepSkipped():
                self._put(event.step, skipped_in_a_row=event.in_a_row)
            case AttemptEnded() | AttemptFailed():
                if isinstance(event, AttemptEnded):
                    self._about.end = FINISHED if event.finished else STOPPED
                for tracker in self._all.values():
                    tracker.end()
                if self._about.end == FINISHED:  # after a stop the machine may be gone in seconds
                    until = time.monotonic() + OPEN_SECONDS
                    for tracker in self._all.values():
                        tracker.ready.wait(until - time.monotonic())
                until = time.monotonic() + END_SECONDS
                for tracker in self._all.values():
                    tracker.close(max(0.0, until - time.monotonic()))

    def _put(self, step: int, **values: float) -> None:
        finite = {tag(name): value for name, value in values.items() if math.isfinite(value)}
        for tracker in self._all.values():
            tracker.put((step, finite))
