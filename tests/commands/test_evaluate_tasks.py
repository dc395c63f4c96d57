"""`mingpt evaluate --tasks` and train.eval_tasks: the same figures in both, in any world, and the bits stay."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from config_kit import configured
from mingpt.commands.evaluate import command
from mingpt.data.vocabulary import Numbers
from mingpt.errors import UserError
from mingpt.observe.console import ConsoleLines
from mingpt.observe.events import TasksEvaluated
from mingpt.observe.jsonl import read_metrics
from mingpt.train.attempt import attempt
from mingpt.train.tasks import due, load_tasks, of_training
from mingpt.world.lifetime import Lifetime
from own_kit import CLASSIFIER
from run_kit import TIME_LIMIT, Run
from tasks_kit import TASKS, write_tasks

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    load_tasks.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks")


def answered(capsys: Captured, *arguments: str) -> dict[str, Any]:
    assert command([*arguments, "--json"], Lifetime()) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: Captured, *arguments: str) -> str:
    assert command([*arguments], Lifetime()) == 64
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    return line.removeprefix("error: ")


@pytest.mark.slow
def test_training_measures_tasks_in_any_world_and_its_bits_stay(
    undisturbed: Callable[..., Run], new_run: Callable[..., Run], folder: Path, capsys: Captured
) -> None:
    run = new_run(
        f"train.eval_tasks=[{','.join(TASKS)}]", f"train.eval_tasks_path={folder}", "train.eval_tasks_every=8"
    )
    output = run.finish(2)
    assert run.digest() == undisturbed().digest()
    rows = {row["step"]: {k: v for k, v in row.items() if "tasks/" in k} for row in read_metrics(run.dir)}
    assert [step for step, row in rows.items() if row] == [8, 16, 24]
    for step in (8, 24):  # one process alone, with the same batches: to the bit
        options = ("--tasks", ",".join(TASKS), "--include-path", str(folder))
        found = answered(capsys, run.dir, "--step", str(step), *options)
        assert found["step"] == step
        results = {name.removeprefix("tasks/").replace("/", " "): value for name, value in rows[step].items()}
        assert results == {
            f"{task} {metric}": found["results"][task][f"{metric},none"]
            for task, metric in (name.split() for name in results)
        }
    assert len(results) == 5
    assert output.count("step 24: kit_choice/acc ") == 1  # one process tells
    assert "Running" not in output
    assert "it/s" not in output


FAILS = """
import os

def process_results(doc, results):
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("no answers")
    return {"acc": 1}
"""


@pytest.mark.slow
def test_what_is_wrong_with_a_task_never_ends_a_run(
    undisturbed: Callable[..., Run], new_run: Callable[..., Run], folder: Path
) -> None:
    """Here in one process only; all go on alike, and the last state is stored."""
    (folder / "code.py").write_text(FAILS)
    with (folder / "kit_choice.yaml").open("a") as task:
        task.write("process_results: !function code.process_results\n")
    run = new_run("train.eval_tasks=[kit_choice]", f"train.eval_tasks_path={folder}", "train.eval_tasks_every=16")
    output = run.finish(2)
    assert run.digest() == undisturbed().digest()
    lines = [line for line in output.splitlines() if "not measured" in line]
    assert lines == [f"step {step}: train.eval_tasks not measured: ZeroDivisionError: no answers" for step in (16, 24)]
    assert [row["step"] for row in read_metrics(run.dir) if row.get("tasks/failed")] == [16, 24]


@pytest.mark.slow
def test_a_stop_does_not_wait_for_a_long_measurement(new_run: Callable[..., Run], tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "tasks", pages=300, questions=300, page_words=100)  # some 5,000 batches
    run = new_run("train.eval_tasks=[kit_rolling]", f"train.eval_tasks_path={folder}", "train.eval_tasks_every=8")
    started = run.start(2)
    started.on_step = lambda step: os.kill(started.workers()[1], signal.SIGTERM) if step == 8 else None
    started.wait()
    assert "stopped on request: step 9" in started.output
    assert "kit_rolling" not in started.output.partition("step  8/24")[2]
    assert run.store.steps()[0] == 9


@pytest.mark.slow
def test_people_get_lm_evals_table(
    undisturbed: Callable[..., Run], folder: Path, capsys: Captured, tmp_path: Path
) -> None:
    run = undisturbed()
    options = [run.dir, "--tasks", "kit_cho*,kit_generate", "--include-path", str(folder), "--limit", "3"]
    assert command([*options, "--num-fewshot", "1", "--batch-size", "1"], Lifetime()) == 0
    out, err = capsys.readouterr()
    first, header, _, *rows = out.splitlines()
    assert first == f"{run.dir}/snapshots/step-000000024"
    assert "Metric" in header
    assert [row.split("|")[1].strip() for row in rows] == ["kit_choice", "", "kit_generate"]
    assert {row.split("|")[4].strip() for row in rows if row.split("|")[1].strip()} == {"1"}
    assert err == ""
    group = answered(capsys, run.dir, "--tasks", "kit_group", "--include-path", str(folder))
    assert group["groups"]["kit_group"]["acc,none"] == group["results"]["kit_choice"]["acc,none"]
    assert group["n-samples"] == {"kit_choice": {"original": 11, "effective": 11}}
    lacking = write_tasks(tmp_path / "lacking", also=" über")
    # A process of its own: one that fails in a world ends for good soon after.
    refused = subprocess.run(
        [sys.executable, "-m", "mingpt.evaluate", run.dir, "--tasks", "kit_choice", "--include-path", str(lacking)],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert refused.returncode == 64
    assert refused.stderr == "error: task kit_choice: the text has characters that the model never saw: 'bü'\n"


def test_what_does_not_go_together_is_told(capsys: Captured, folder: Path) -> None:
    for option in ("--limit", "--batch-size", "--num-fewshot"):
        assert refused(capsys, "run", option, "3") == f"{option} is for --tasks: name the tasks, or leave it out"
    assert refused(capsys, "run", "--tasks", ",") == "--tasks: name at least one task"
    assert refused(capsys, "run", "--tasks", "x", "--limit", "0") == "--limit=0: give a number above 0"


@pytest.mark.slow
def test_a_run_is_refused_before_it_meets_the_others(
    folder: Path, text: Path, tmp_path: Path, capsys: Captured, undisturbed: Callable[..., Run]
) -> None:
    places = (f"data.path={text}", f"data.cache_dir={tmp_path}", f"run.dir={tmp_path}/run")
    ours = ("model=gpt-nano", "data=char", f"train.eval_tasks_path={folder}")
    assert attempt([*ours, *places, "train.eval_tasks=[kit_chioce]"], Lifetime()) == 64
    assert "train.eval_tasks: there is no task kit_chioce (did you mean kit_choice" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    line = refused(capsys, undisturbed().dir, "--tasks", "kit_choice", "data=char")
    assert line == "data=char: tasks bring their own data: leave it out, or leave --tasks out"


def test_only_a_gpt_of_text_answers(folder: Path) -> None:
    own = configured(*CLASSIFIER, "train.eval_tasks=[kit_choice]")
    with pytest.raises(UserError, match=r"train\.eval_tasks: tasks ask a GPT, and model\._target_ names another model"):
        of_training(own, Numbers(9))
    gpt = configured("train.eval_tasks=[kit_choice]", f"train.eval_tasks_path={folder}")
    with pytest.raises(UserError, match=r"train\.eval_tasks: the model's tokens are no text"):
        of_training(gpt, Numbers(9))


def test_when_tasks_are_due() -> None:
    some, end, none = (
        configured(*overrides).train
        for overrides in (("train.eval_tasks=[x]", "train.eval_tasks_every=4"), ("train.eval_tasks=[x]",), ())
    )
    assert [step for step in range(1, 11) if due(some, step, step == 10)] == [4, 8, 10]
    assert [step for step in range(1, 11) if due(end, step, step == 10)] == [10]
    assert not due(none, 10, True)


def test_the_line_of_tasks() -> None:
    said = list[str]()
    ConsoleLines(9, said.append).on(TasksEvaluated(4, {"a/acc": 0.25, "b/exact_match/strict": 1.0}))
    assert said == ["step 4: a/acc 0.2500, b/exact_match/strict 1.0000"]
    failed = TasksEvaluated(8, {}, "task a: why")
    ConsoleLines(9, said.append).on(failed)
    assert said[1:] == ["step 8: train.eval_tasks not measured: task a: why"]
    assert failed.curves == {"tasks/failed": 1.0}
