"""`mingpt report` of real runs."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_kit import Mingpt
from mingpt.commands import report
from mingpt.observe.jsonl import read_metrics
from mingpt.report.reading import read_run
from node_kit import wait_until
from run_kit import TIME_LIMIT, Run


@pytest.mark.slow
def test_a_run_with_a_kill_and_another_world(
    new_run: Callable[..., Run], undisturbed: Callable[..., Run], tmp_path: Path
) -> None:
    run, other = new_run(), undisturbed("optimizer.lr=0.02")
    started = run.start(1)
    started.on_step = lambda step: started.process.kill() if step == 11 else None
    assert started.wait() < 0
    run.finish(2)
    mingpt = Mingpt(tmp_path)
    done = mingpt("report", run.dir)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"report: {run.dir}/report.html\n"
    page = (Path(run.dir) / "report.html").read_text()
    assert run.digest() in page

    read = read_run(run.dir)
    assert [(a.world_size, a.device, a.end) for a in read.attempts] == [(1, "cpu", "killed"), (2, "cpu", "finished")]
    assert read.kept == {1: read.attempts[1].from_step, 2: 24}
    rows = read_metrics(run.dir)
    assert read.loss.values.tolist() == [row["loss"] for row in rows]
    assert read.curve("val_loss").steps.tolist() == [8, 16, 24]

    assert report.main([run.dir, other.dir, "--out", str(tmp_path / "both.html")]) == 0


@pytest.mark.slow
def test_a_run_that_is_going_on(new_run: Callable[..., Run]) -> None:
    run = new_run("train.max_steps=100000", "snapshot.every_steps=0", "train.eval_every=0")
    trains = threading.Event()
    started = run.start(1)
    started.on_step = lambda step: trains.set() if step == 3 else None
    try:
        assert trains.wait(TIME_LIMIT), started.output
        wait_until((Path(run.dir) / "ledger/attempt-00001.json").exists, "the account")  # a thread writes it
        code = report.main([run.dir])
        assert started.process.poll() is None, started.output
    finally:
        started.process.kill()
        started.wait()
    assert code == 0
    page = (Path(run.dir) / "report.html").read_text()
    assert "no end: still going on, or killed" in page


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    done = Mingpt(tmp_path)("report", "nowhere")
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith("error: nowhere: no run is there: check the spelling; give a run's directory")
