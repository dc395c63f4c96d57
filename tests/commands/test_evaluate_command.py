"""`mingpt evaluate`: the training's own figures again, in any world, on other data, or of lm-eval's tasks."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from branch_kit import train
from config_kit import configured
from mingpt.commands.evaluate import command
from mingpt.data.vocabulary import Numbers
from mingpt.errors import UserError
from mingpt.observe.jsonl import read_metrics
from mingpt.train.attempt import attempt
from mingpt.train.tasks import due, load_tasks, of_training
from mingpt.world.lifetime import Lifetime
from own_kit import CLASSIFIER
from run_kit import TIME_LIMIT, Run
from snapshot_kit import signed
from tasks_kit import TASKS, write_tasks
from told import Told

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def around(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Offline; and a refusal in a world, which ends its process soon after, ends only the command."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("mingpt.world.joining._exit_after", lambda seconds, code: None)
    load_tasks.cache_clear()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks")


@pytest.fixture
def places(text: Path, cache: Path) -> tuple[str, ...]:
    """Where the text is, an absolute path, is not taken from a snapshot."""
    return f"data.path={text}", f"data.cache_dir={cache}"


def evaluated(capsys: Captured, *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert command([*map(str, arguments), "--json"], Lifetime()) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: Captured, *arguments: object) -> str:
    assert command([*map(str, arguments)], Lifetime()) == 64
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_the_figures_are_those_that_training_has_measured(
    text: Path, cache: Path, tmp_path: Path, capsys: Captured
) -> None:
    """bits_per_byte: of the bytes of a character, of which é has two."""
    wide = tmp_path / "wide.txt"
    wide.write_text(text.read_text().replace("e", "é"))
    train(tmp_path / "run", wide, cache, "train.eval_batches=0")
    row, found = read_metrics(f"{tmp_path}/run")[7], evaluated(capsys, f"{tmp_path}/run@8", f"data.path={wide}")
    assert (found["step"], found["loss"]) == (8, row["val_loss"])  # to the bit
    assert (found["bits_per_byte"], found["perplexity"]) == (row["val_bits_per_byte"], math.exp(row["val_loss"]))
    # A tenth of 6,000 characters, but for the first.
    assert (found["targets"], found["bytes"]) == (599, len(wide.read_text()[5401:].encode()))
    bits = found["loss"] * 599 / math.log(2) / found["bytes"]
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    assert "accuracy" not in found


@pytest.mark.slow
def test_several_processes_find_the_same_and_one_of_them_tells(
    trained: Path, places: tuple[str, ...], capsys: Captured
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"),
            *("-m", "mingpt.evaluate", str(trained), "--json", *places),
        ],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [evaluated(capsys, trained, *places)]


def test_other_data_is_told_in_the_snapshots_vocabulary(trained: Path, capsys: Captured, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("the queen is dead\n" * 40)  # fewer characters than the model knows
    here = (trained, f"data.path={other}", "data.val_fraction=0.5")
    losses = [evaluated(capsys, *here, *more)["loss"] for more in ((), ("data=byte",), ("batch.micro_size=64",))]
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-5)
    assert evaluated(capsys, *here)["targets"] == 359


@pytest.mark.parametrize(
    "arguments",
    [
        "model.n_layer=3", "data.pth=x", "data.path={tmp}/none", "--step=5", "data.val_fraction=0",
        "data.path={tmp}/digits.txt", "--limit=3", "--batch-size=3", "--num-fewshot=3", "--tasks=,",
        "--tasks=x --limit=0", "--tasks=kit_choice data=char", "--tasks=kit_choice --include-path={tmp}/lacking",
    ],
)  # fmt: skip
def test_mistakes(
    arguments: str, trained: Path, places: tuple[str, ...], tmp_path: Path, capsys: Captured, told: Told
) -> None:
    (tmp_path / "digits.txt").write_text("0123456789" * 20)
    write_tasks(tmp_path / "lacking", also=" über")
    words = arguments.format(tmp=tmp_path).split()
    told(refused(capsys, trained, *(() if "task" in arguments else places), *words), trained, tmp_path)


@pytest.mark.parametrize("of", [(), ("--tasks", "arc_easy")])
def test_a_process_of_several_without_a_rank_does_not_evaluate_alone(
    of: tuple[str, ...], trained: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "RANK" in refused(capsys, trained, *of)


def test_a_strangers_config_is_data_and_nothing_else(
    trained: Path, places: tuple[str, ...], capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No interpolation in it is resolved, and no folder of its choice is made."""
    monkeypatch.setenv("SECRET", "of mine")
    run = shutil.copytree(trained, tmp_path / "run")
    path = run / "snapshots/step-000000012/manifest.json"
    theirs = json.loads(path.read_bytes())
    for text in ("${oc.env:SECRET}", "s3://***@bucket/text", places[0].partition("=")[2]):
        theirs["config"]["data"] |= {"path": text, "cache_dir": str(tmp_path / "made")}
        path.write_bytes(signed(theirs))
        assert "data.path" in (line := refused(capsys, run, places[1]))
        assert "of mine" not in line
    assert evaluated(capsys, run, places[0])["digest"] == theirs["digest"]
    assert not (tmp_path / "made").exists()


# --- tasks ---


@pytest.mark.slow
def test_training_measures_tasks_in_any_world_and_its_bits_stay(
    undisturbed: Callable[..., Run], new_run: Callable[..., Run], folder: Path, capsys: Captured
) -> None:
    options = f"train.eval_tasks_path={folder}", "train.eval_tasks_every=8"
    run = new_run(f"train.eval_tasks=[{','.join(TASKS)}]", *options)
    output = run.finish(2)
    assert run.digest() == undisturbed().digest()
    rows = {row["step"]: {k: v for k, v in row.items() if "tasks/" in k} for row in read_metrics(run.dir)}
    assert [step for step, row in rows.items() if row] == [8, 16, 24]
    for step in (8, 24):  # one process alone, with the same batches: to the bit
        found = evaluated(capsys, f"{run.dir}@{step}", "--tasks", ",".join(TASKS), "--include-path", folder)
        results = {
            f"tasks/{task}/{metric.removesuffix(',none')}": value
            for task, values in found["results"].items()
            for metric, value in values.items()
        }
        assert len(rows[step]) == 5
        assert rows[step].items() <= results.items()
    assert output.count("step 24: kit_choice/acc ") == 1  # one process tells
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
    assert run.finish(2).count("not measured: ZeroDivisionError: no answers") == 2
    assert run.digest() == undisturbed().digest()
    assert [row["step"] for row in read_metrics(run.dir) if row.get("tasks/failed")] == [16, 24]


def test_people_get_lm_evals_table(trained: Path, folder: Path, capsys: Captured) -> None:
    options = ("--include-path", str(folder), "--limit", "3", "--num-fewshot", "1", "--batch-size", "1")
    found = evaluated(capsys, trained, "--tasks", "kit_group", *options)
    assert found["groups"]["kit_group"]["acc,none"] == found["results"]["kit_choice"]["acc,none"]
    assert found["n-samples"] == {"kit_choice": {"original": 11, "effective": 3}}
    assert command([str(trained), "--tasks", "kit_cho*", *options], Lifetime()) == 0
    cells = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    assert ("kit_choice", "1") in [(row[1], row[4]) for row in cells if len(row) > 4]


def test_a_run_with_a_task_that_is_not_there_leaves_nothing(
    folder: Path, places: tuple[str, ...], tmp_path: Path, capsys: Captured
) -> None:
    tasks = ("train.eval_tasks=[kit_chioce]", f"train.eval_tasks_path={folder}", f"run.dir={tmp_path}/run")
    assert attempt(["model=gpt-nano", "data=char", *places, *tasks], Lifetime()) == 64
    assert "train.eval_tasks: there is no task kit_chioce (did you mean kit_choice" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model", [CLASSIFIER, ()])
def test_only_a_gpt_of_text_answers(model: tuple[str, ...], folder: Path) -> None:
    config = configured(*model, "train.eval_tasks=[kit_choice]", f"train.eval_tasks_path={folder}")
    with pytest.raises(UserError, match=r"train\.eval_tasks: "):
        of_training(config, Numbers(9))


@pytest.mark.parametrize(("every", "steps"), [(4, [4, 8, 10]), (0, [10])])
def test_when_tasks_are_due(every: int, steps: list[int]) -> None:
    config = configured("train.eval_tasks=[x]", f"train.eval_tasks_every={every}").train
    assert [step for step in range(1, 11) if due(config, step, step == 10)] == steps
    assert not due(configured().train, 10, True)
