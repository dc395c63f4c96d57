"""`mingpt train -m`: Hydra's multirun, whose jobs are runs. Their launches are stand-ins but in the slow test."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from mingpt.cli import cli
from mingpt.commands import multirun
from mingpt.compose.resolvers import name_of
from mingpt.history.history import History
from tests.kits.node_kit import wait_until
from tests.kits.paths_kit import ROOT, ran
from tests.kits.told import Told

WAIT = 600.0  # seconds for what a process is to do: a limit for hangs
# What a launch writes of a run. SAYS: by the run's name, what it is to do: an exit code, or `hold` (until it is asked
# to stop). Its loss is |log10(lr) + 3|.
LAUNCH = """
import json, math, os, pathlib, signal, sys, time
given, asked = dict(a.lstrip("+").split("=", 1) for a in sys.argv[1:]), []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
folder = pathlib.Path(given["run.dir"].strip("'"))
print(json.dumps(sys.argv[1:]), flush=True)
says = json.loads(os.environ["SAYS"]).get(folder.name, 0)
if says and says != "hold":
    sys.exit(says)
(folder / "metrics").mkdir(parents=True)
(folder / "config.yaml").write_text(json.dumps({"seed": int(given.get("seed", 1)), "run": {"name": folder.name}}))
(folder / "group").write_text(os.environ["WANDB_RUN_GROUP"])
while says == "hold" and not asked:
    time.sleep(0.01)
row = {"step": 5, "val_loss": abs(math.log10(float(given.get("optimizer.lr", 1e-3))) + 3)}
(folder / "metrics/attempt-00001.jsonl").write_text(json.dumps(row))
sys.exit(75 if asked else 0)
"""


Sweeps = Callable[..., int]


@pytest.fixture
def sweeps(logging_as_before: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sweeps]:
    """Runs `mingpt train -m` in an empty folder, in this process; says: what launches are to do, by run."""
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    monkeypatch.setattr(multirun, "LAUNCH", (sys.executable, "-c", LAUNCH))
    monkeypatch.setattr(sys, "argv", ["mingpt train"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def sweeps(*arguments: str, says: Mapping[str, int | str] | None = None) -> int:
        monkeypatch.setenv("SAYS", json.dumps(says or {}))
        return cli.run("train", ["-m", "experiment=synthetic", *arguments])

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield sweeps
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_each_combination_is_a_run_and_one_that_fails_ends_no_other(
    sweeps: Sweeps, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("conf/schedule").mkdir(parents=True)
    Path("conf/schedule/mine.yaml").write_text("kind: constant\n")
    given = (
        "--config-dir=conf",
        "schedule=mine",
        "optimizer.lr=1e-3,3e-3",
        "seed=range(1,3)",
        "hydra.sweep.dir=runs/a",
    )
    assert sweeps(*given, says={"optimizer.lr-0.001_seed-2": 70}) == 70
    told = capfd.readouterr()
    assert "runs/a/optimizer.lr-0.001_seed-2.log" in told.err
    assert told.out.splitlines()[-3].split()[0] == "optimizer.lr-0.001_seed-1"  # the lowest loss first
    names = [f"optimizer.lr-{lr}_seed-{seed}" for lr in ("0.001", "0.003") for seed in (1, 2)]
    for name in names:
        found = json.loads(Path(f"runs/a/{name}.log").read_text())  # the arguments of its only launch
        assert found[:2] == [f"--config-dir={Path('conf').absolute()}", "--config-name=train"]
        assert found[-2:] == [f"run.name={name}", f"run.dir='runs/a/{name}'"]
        assert {"experiment=synthetic", "schedule=mine"} <= {*found}
    assert {path.read_text() for path in Path("runs/a").glob("*/group")} == {"a"}  # in W&B
    assert not Path("multirun").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        "optimizer.lr=-1,1e-3 batch.micro_siz=2 model=gpt3,gpt2",
        "~data._target_ data=char data.path=no.txt,none.txt batch.global_size=8 batch.micro_size=8",
        "run.dir=a,b data.path=https://me:S3CRET@host/x",
        "seed",
        "optimizer.lr=interval(1e-4,1e-2)",
        "hydra/sweeper=optuna optimizer.lr=interval(-2,-1)",
        "--config-dir=nowhere seed=1,2",
        "seed=1,2 --cfg job",
    ],
)
def test_all_mistakes_are_told_before_the_first_job_starts(
    arguments: str, sweeps: Sweeps, tmp_path: Path, capfd: pytest.CaptureFixture[str], told: Told
) -> None:
    with suppress(SystemExit):
        assert sweeps(*arguments.split()) == 64
    out, err = capfd.readouterr()
    assert (out, [*tmp_path.iterdir()]) == ("", [])
    told(err, tmp_path)


def test_a_request_to_stop_stops_the_run_and_starts_no_other(sweeps: Sweeps) -> None:
    def stop() -> None:
        with suppress(AssertionError):
            wait_until(Path("runs/sweep/seed-1/config.yaml").exists, "it trains")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    assert sweeps("seed=1,2", says={"seed-1": "hold"}) == 75
    assert Path("runs/sweep/seed-1/metrics/attempt-00001.jsonl").exists()  # it has ended by itself
    assert not Path("runs/sweep/seed-2.log").exists()


def test_a_search_gets_the_losses(sweeps: Sweeps) -> None:
    how = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.sampler.seed=1", "hydra.sweeper.n_jobs=1")
    assert sweeps(*how, "optimizer.lr=tag(log,interval(1e-4,1e-2))") == 0
    losses = [History(str(path)).last_of("val_loss") for path in Path("runs/sweep").glob("optimizer.lr-*/")]
    assert len(set(losses)) == 2
    assert f"best_value: {min(losses)}" in Path("runs/sweep/optimization_results.yaml").read_text()


def test_a_name_is_safe_and_those_that_lose_characters_stay_apart() -> None:
    strange = [name_of(f"data.path='{path}'") for path in ("/a b", "/a/b", "../../x", "é" * 300)]
    assert len(set(strange)) == 4
    assert all(name.isascii() and len(name) <= 100 and not set(name) & set("/ '=$") for name in strange)


# --- SkyPilot ---

SKY = """#!/bin/bash
printf '%q ' "$@" >> calls; echo >> calls
[ "$2" != queue ] || echo 'started the server
[{"job_name": "lr-seed-1"}]'
"""
TO_SKY = ("hydra/launcher=skypilot", "hydra.launcher.bucket=memory://b/lr", "seed=1,2")


@pytest.fixture
def sky(sweeps: Sweeps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The calls of a program that stands in for SkyPilot's."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sky").write_text(SKY)
    (tmp_path / "bin/sky").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return tmp_path / "calls"


def test_skypilot_gets_a_job_for_each_run_that_is_not_going_on(sweeps: Sweeps, sky: Path, told: Told) -> None:
    assert sweeps(*TO_SKY, "hydra.launcher.args='--gpus L4:1'") == 0
    told(sky.read_text())


@pytest.mark.parametrize("more", [("--config-dir=bin",), ("hydra.launcher.bucket=runs",), ()], ids=str)
def test_what_skypilot_can_not_take(
    more: tuple[str, ...], sweeps: Sweeps, sky: Path, capfd: pytest.CaptureFixture[str], told: Told
) -> None:
    experiment = ["experiment=synthetic"] if more else []
    assert cli.run("train", ["-m", *experiment, *TO_SKY, *more]) == 64
    told(capfd.readouterr().err)
    assert not sky.exists()


# --- real runs ---


@pytest.mark.slow
def test_other_peoples_launchers(tmp_path: Path) -> None:
    how = ("train.max_steps=2", "train.threads=1,2", "track=[]", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    command = [sys.executable, "-m", "mingpt.train", "-m", "experiment=synthetic", *how]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = ran(command, cwd=tmp_path, env=env)
    assert done.returncode == 0, done
    assert done.stdout.count(" finished ") == 2


@pytest.mark.slow
@pytest.mark.nightly
def test_a_multirun_that_is_killed_takes_its_launch_along(tmp_path: Path) -> None:
    how = ("experiment=synthetic", "train.max_steps=1000000", "seed=1,2", f"hydra.sweep.dir={tmp_path}")
    killed = subprocess.Popen([sys.executable, "-m", "mingpt.train", "-m", *how], cwd=ROOT, stdout=subprocess.DEVNULL)
    log = tmp_path / "seed-1.log"
    wait_until(lambda: log.exists() and "\nstep " in log.read_text(), "it trains", WAIT)
    killed.kill()
    killed.wait(WAIT)
    wait_until(lambda: "launch: exit code 75" in log.read_text(), "the kernel has asked it to stop", WAIT)
