"""Sweeps: which trials there are, what is submitted, and a real one that is killed, stopped and started again."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from mingpt.commands import report, sweep
from mingpt.errors import UserError
from mingpt.sweep import local, remote
from mingpt.sweep.expand import expand, name_of, validate
from mingpt.sweep.record import Entry, read_record, rows, table, write_record
from node_kit import pending, suspend
from paths_kit import ROOT
from run_kit import TINY, Run
from sweep_kit import WAIT, meanwhile, wait_for


def names(*overrides: str, zipped: bool = False) -> list[str]:
    return [trial.name for trial in expand([], overrides, "runs/s", zipped)]


def test_all_combinations_in_the_order_of_their_values() -> None:
    assert names("optimizer.lr=1e-3,3e-3", "seed=range(1,3)", "train.max_steps=5") == [
        "optimizer.lr-0.001_seed-1",
        "optimizer.lr-0.001_seed-2",
        "optimizer.lr-0.003_seed-1",
        "optimizer.lr-0.003_seed-2",
    ]
    trial = expand([], ["seed=choice(1,2)", "train.max_steps=5"], "runs/s")[1]
    assert trial.arguments == ["train.max_steps=5", "seed=2", "run.name=seed-2", "run.dir=runs/s/seed-2"]


def test_zip_makes_pairs_and_glob_takes_options() -> None:
    assert names("seed=1,2", "train.max_steps=5,6", zipped=True) == [
        "seed-1_train.max_steps-5",
        "seed-2_train.max_steps-6",
    ]
    assert names("seed=1,1,2", "train.max_steps=5,6,5", zipped=True) == [  # a value may be in several pairs
        "seed-1_train.max_steps-5",
        "seed-1_train.max_steps-6",
        "seed-2_train.max_steps-5",
    ]
    assert names("schedule=glob(c*)") == ["schedule-constant", "schedule-cosine"]
    assert names("seed=1") == ["only"]


@pytest.mark.parametrize(
    ("overrides", "zipped", "said"),
    [
        (["seed=1,2", "batch.micro_size=1,2,4"], True, "--zip: seed has 2, batch.micro_size has 3 values"),
        (["optimizer.lr=interval(1e-4,1e-2)"], False, "an interval has no list of values"),
        (["seed=shuffle(1,2)"], False, "random order"),
        (["seed=1,2", "seed=3,4"], False, "swept twice"),
        (["seed=1,2", "seed=3"], False, "seed=3: seed is swept, too: write one of them"),
        (["++seed=3", "seed=1,2"], False, "++seed=3: seed is swept, too: write one of them"),
        (["run.dir=a,b"], False, "use --name and --dir"),
        (["seed=range(1,500)", "train.max_steps=5,6,7"], False, "1497 trials: a sweep has at most 1000"),
        (["seed=range(1,1000000000000)"], False, "more than 1000 values: a sweep has at most 1000 trials"),
        (["seed=range(1,5000)", "batch.micro_size=range(1,5000)"], True, "at most 1000 trials"),
        (["seed=range(5,1)"], False, "no value in it"),
        (["schedule=glob(x*)"], False, "no option of schedule"),
        (["optimizer.lr=glob(*)"], False, "glob chooses among a group's options"),
        (["seed"], False, "is not an override"),
    ],
)
def test_what_makes_no_trials_is_refused(overrides: list[str], zipped: bool, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        names(*overrides, zipped=zipped)


def test_a_name_is_safe_and_those_that_lose_characters_stay_apart() -> None:
    strange = [name_of([f"data.path='{path}'"]) for path in ("/a b", "/a/b", "../../x", "é" * 300)]
    assert len(set(strange)) == 4
    assert all(name.isascii() and len(name) <= 100 and not set(name) & set("/ '=$") for name in strange)


def test_every_problem_of_every_trial_is_told_before_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sweep.main(["optimizer.lr=-1,1e-3", "batch.micro_siz=2", "seed=1"]) == 64
    told = capfd.readouterr().err
    assert "optimizer.lr--1: optimizer.lr=-1" in told
    assert "batch.micro_siz is not a key" in told
    assert told.count("batch.micro_siz is not a key") == 1
    assert not (tmp_path / "runs").exists()


def test_files_that_trials_lack_are_told_before_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sweep.main(["data=char", "data.path=no.txt,none.txt", "batch.global_size=8", "batch.micro_size=8"]) == 64
    told = capfd.readouterr().err
    assert "data.path-no.txt: data.path=no.txt: there is no such file" in told
    assert "data.path-none.txt: data.path=none.txt: there is no such file" in told
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--launcher-args=--comment 'a", "--on=slurm"], "--launcher-args: No closing quotation: close its quotes"),
        (["--nproc-per-node=two"], "--nproc-per-node=two: give a number from 1, or leave it out"),
        (["--nproc-per-node=0"], "--nproc-per-node=0: give a number from 1, or leave it out"),
        (["--dir="], "--dir is empty: give a folder"),
        (["--dir=", "--on=sky"], "--dir is empty: give a folder"),
    ],
)
def test_options_that_no_trial_could_take_are_refused(
    options: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep.main(["experiment=shakespeare_char", "seed=1,2", "--dry-run", *options]) == 64
    assert capfd.readouterr() == ("", f"error: {said}\n")


def test_threads_do_not_follow_from_the_number_of_trials() -> None:
    trials = expand([], ["train.threads=1,3"], "runs/s")
    configs = validate(trials)
    assert [local.environment(configs[t.name])["OMP_NUM_THREADS"] for t in trials] == ["1", "3"]


def test_what_slurm_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    how = ["seed=1,2", "--on", "slurm", "--parallel", "1", "--launcher-args=--nodes=2 --time=10"]
    assert sweep.main([*how, "--dry-run"]) == 0
    submit = (
        "sbatch --parsable --job-name=sweep --array=1-2%1 --nodes=2 --time=10 "
        "recipes/slurm/sweep.sbatch runs/sweep/trials.txt"
    )
    assert capfd.readouterr().out.splitlines() == [
        "# runs/sweep/trials.txt:",
        "# seed=1 run.name=seed-1 run.dir=runs/sweep/seed-1",
        "# seed=2 run.name=seed-2 run.dir=runs/sweep/seed-2",
        submit,
    ]
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    stand_in(tmp_path, monkeypatch, "sbatch", "echo 17")
    stand_in(tmp_path, monkeypatch, "squeue", '[ "$2" = --jobs=17 ] && echo 17')
    assert sweep.main(how) == 0
    assert (tmp_path / "sbatch.said").read_text() == " ".join(shlex.split(submit)[1:]) + "\n"
    assert sweep.main(how) == 64
    assert "job 17 of this sweep is in Slurm's queue" in capfd.readouterr().err


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, does: str) -> None:
    """A program that notes its arguments."""
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\necho "$*" >> {folder}/{name}.said\n{does}\n')
    program.chmod(0o755)
    if str(program.parent) not in os.environ["PATH"]:
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_a_task_of_the_array_trains_the_trial_of_its_line(tmp_path: Path) -> None:
    trials = expand([], ["seed=1,2", "data.path='a b*\n$(echo \\'c\\')'"], "runs/s")
    (tmp_path / "trials.txt").write_text(remote.lines_of(trials))
    (tmp_path / "recipes/slurm").mkdir(parents=True)
    (tmp_path / "recipes/slurm/job.sh").write_text(
        'set -uf\ncomplain() { echo "$*" >&2; }\nlaunch_on_all() { printf "%s\\0" "$@"; }\n'
    )

    def task(number: str, arguments: Sequence[str] = ("trials.txt",)) -> "subprocess.CompletedProcess[str]":
        variables = {**os.environ, "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_ARRAY_TASK_ID": number}
        script = str(ROOT / remote.SCRIPT)
        command = ["bash", script, *arguments]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)

    assert task("2").stdout.split("\0") == [*trials[1].arguments, ""]
    assert task("3").returncode == 64
    nothing = task("2", [])
    assert (nothing.returncode, nothing.stdout) == (64, "")
    assert nothing.stderr == "name the file of trials: sbatch --array=1-N recipes/slurm/sweep.sbatch FILE\n"


def test_what_skypilot_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    how = [
        "experiment=shakespeare_char",
        "seed=1,2",
        "--on=sky",
        "--dir=s3://b/runs",
        "--launcher-args=--gpus L4:1",
        "--dry-run",
    ]
    assert sweep.main(how) == 0
    assert capfd.readouterr().out.splitlines() == [
        f"sky jobs launch -y -d -n sweep-seed-{n} --gpus L4:1 --env BUCKET=s3://b/runs/sweep --env RUN=seed-{n} "
        f"--env EXPERIMENT=shakespeare_char --env 'OVERRIDES=seed={n} run.name=seed-{n}' recipes/train-spot.yaml"
        for n in (1, 2)
    ]
    assert sweep.main(["seed=1,2", "--on=sky", "--dir=s3://b/runs", "--dry-run"]) == 64
    assert "experiment=… is missing" in capfd.readouterr().err
    with monkeypatch.context() as nothing:
        nothing.setenv("PATH", str(tmp_path))
        nothing.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # a bucket that is asked first would be told of
        assert sweep.main([word for word in how if word != "--dry-run"]) == 64
    assert capfd.readouterr().err.splitlines() == [
        "error: 2 problems:",
        "  1. sky is not there: run this where it is installed, or use --on local",
        "  2. recipes/train-spot.yaml is not there: run this in the project's folder",
    ]
    # SkyPilot 0.14.1's answer, but for the other fields. It may begin with text, and has 50 jobs only, without --all.
    answer = """case "$*" in
"jobs queue "*) echo "✓ SkyPilot API server started."; echo '['
  case "$*" in *" --all"*) echo '  {"job_id": 1, "job_name": "sweep-seed-1", "status": "PENDING"},' ;; esac
  echo '  {"job_id": 51, "job_name": "sweep-seed-51", "status": "RECOVERING"}'; echo ']' ;;
esac"""
    stand_in(tmp_path, monkeypatch, "sky", answer)
    remote.submit_jobs([["sky", "jobs", "launch", "-n", f"sweep-seed-{n}"] for n in (1, 5, 51)])
    assert (tmp_path / "sky.said").read_text().splitlines()[1:] == ["jobs launch -n sweep-seed-5"]


def test_names_that_skypilot_refuses(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    how = ["experiment=shakespeare_char", "seed=1,2", "--on=sky", "--dir=s3://b/runs", "--dry-run"]
    assert sweep.main([*how, "--name=7"]) == 64
    assert "7-seed-1: SkyPilot's names begin with a letter, and end with a letter or a digit" in capfd.readouterr().err


def test_a_folder_that_is_no_sweep_and_one_that_is_damaged(tmp_path: Path) -> None:
    assert read_record(str(tmp_path)) is None
    write_record(str(tmp_path), {"a": Entry({"seed": "1"}, ["seed=1"], 5, str(tmp_path / "a/snapshots"))})
    assert list(read_record(str(tmp_path)) or {}) == ["a"]
    (tmp_path / "sweep.json").write_text(json.dumps({"a": 3}))
    with pytest.raises(UserError, match=r"sweep.json can't be read"):
        read_record(str(tmp_path))


def test_a_table_is_aligned() -> None:
    one = {"trial": "a", "seed": "1", "state": "finished", "step": 5, "loss": 1.5, "val_loss": None}
    assert table([one]).splitlines() == ["seed  state     step  loss    val_loss", "1     finished  5     1.5000  –"]


@pytest.mark.slow
def test_a_trial_is_killed_and_the_sweep_stopped_and_started_again(
    tmp_path: Path, text: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two at a time, killed and stopped: the bits of a search with one at a time, which nothing disturbs."""
    data = (f"data.path={text}", f"data.cache_dir={cache}")
    few = ("batch.global_size=2", "train.max_steps=320", "train.eval_every=160", "snapshot.every_steps=40")
    how = [*TINY, *data, *few, f"--dir={tmp_path}"]
    grid, folder, found = [*how, "seed=1,2", "--parallel=2"], tmp_path / "sweep", dict[int, int]()

    def go_on() -> None:
        wait_for(lambda: signal.SIGTERM in pending(found[2]))
        os.kill(found[2], signal.SIGCONT)

    def disturb() -> None:
        """Halt both at their first snapshots; kill one, and ask the sweep to stop."""
        while len(found) < 2:
            for seed in {1, 2} - found.keys():
                wait_for(lambda: any(folder.glob("seed-[12]/snapshots/*/manifest.json")))
                if any(folder.glob(f"seed-{seed}/snapshots/*/manifest.json")):
                    (found[seed],) = (pid for pid in children() if f"{folder}/seed-{seed}".encode() in words(pid))
                    suspend(found[seed])
            time.sleep(0.01)
        os.kill(found[1], signal.SIGKILL)
        threading.Thread(target=go_on, daemon=True).start()

    meanwhile(disturb)
    assert sweep.main(grid) == 75
    ends = {row["trial"]: row["state"] for row in rows(str(folder), read_record(str(folder)) or {})}
    assert ends == {"seed-1": "running, or killed", "seed-2": "stopped"}
    assert sweep.main(grid) == 0
    search = ["train", "-m", *how, "--name=search", "seed=1,2", "--optimize=val_loss", "--trials=9"]
    again = subprocess.run(
        [sys.executable, "-c", "from mingpt.cli import main; raise SystemExit(main())", *search],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2 * WAIT,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    for seed in (1, 2):
        alone = Run(str(tmp_path / f"search/seed-{seed}"), text, cache)
        assert Run(str(folder / f"seed-{seed}"), text, cache).digest() == alone.digest()
    capsys.readouterr()
    assert report.main([str(folder)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[:2] for line in shown[:3]) == [["1", "finished"], ["2", "finished"], ["seed", "state"]]


def children() -> list[int]:
    found = list[int]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended while we looked
            found.extend(int(pid) for pid in (task / "children").read_text().split())
    return found


def words(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
