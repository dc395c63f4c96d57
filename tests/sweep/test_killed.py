"""The sweep itself is killed, between two trials and in one: started again, it leaves finished trials as they are.
Or it is stopped before it has started one.
"""

import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paths_kit import CRASH_SITE, ROOT
from run_kit import TINY, Run
from sweep_kit import WAIT, has_opened, wait_for

pytestmark = pytest.mark.slow


def start(*arguments: str, **more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "mingpt.sweep", *arguments]
    output, errors = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **more}, stdout=output, stderr=errors, text=True)


def test_a_sweep_that_is_killed_twice(tmp_path: Path, text: Path, cache: Path) -> None:
    few = (
        "batch.global_size=2",
        "train.max_steps=100",
        "train.log_every=50",
        "train.eval_every=0",
        "snapshot.every_steps=20",
    )
    how = (*TINY, *few, f"data.path={text}", f"data.cache_dir={cache}", f"--dir={tmp_path}", "seed=1,2")
    first, second, alone = (
        Run(f"{tmp_path}/{name}", text, cache) for name in ("sweep/seed-1", "sweep/seed-2", "alone")
    )

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in Path(first.dir).rglob("*")}

    between = start(*how)
    assert between.stdout
    for line in between.stdout:
        if line.startswith("seed-1: finished"):
            break
    between.kill()
    between.communicate(timeout=WAIT)
    before = written()
    assert first.store.steps()[0] == 100

    slow = tmp_path / "slow"  # the trial waits for seconds after its first snapshot
    slow.write_text("after manifest durable slow")
    site = os.pathsep.join((str(CRASH_SITE), str(ROOT)))
    during = start(*how, PYTHONPATH=site, CRASH_AT=str(slow), CRASH_PART_BYTES="40000")
    wait_for(lambda: any(Path(second.dir).glob("snapshots/*/manifest.json")))
    during.kill()
    during.communicate(timeout=WAIT)
    with (tmp_path / "sweep/sweep.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which the trial holds until it has stored its snapshot
    assert second.store.steps()[0] < 100

    told, _ = start(*how).communicate(timeout=WAIT)
    ends = sorted(re.findall(r"^(\d) +(finished) +(\d+) ", told, re.M))
    assert ends == [("1", "finished", "100"), ("2", "finished", "100")]
    assert written() == before
    assert len(list(Path(second.dir).glob("metrics/attempt-*"))) >= 2
    alone.finish(1, *few, "seed=2")
    assert second.digest() == alone.digest()


@pytest.mark.parametrize(("number", "imports"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_sweep_that_is_stopped_before_its_first_trial(tmp_path: Path, number: int, imports: bool) -> None:
    """As it imports, and as it waits for the lock."""
    lock, importing = tmp_path / "sweep/sweep.lock", tmp_path / "imports"
    if imports:
        (tmp_path / "hydra.py").write_text(f"open({str(importing)!r}, 'w'); import signal; signal.pause()")
    lock.parent.mkdir()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        how = ("experiment=synthetic", f"--dir={tmp_path}", "seed=1,2")
        process = start(*how, PYTHONPATH=f"{tmp_path}:{ROOT}")
        wait_for(lambda: importing.exists() or has_opened(process.pid, str(lock)))
        process.send_signal(number)
        told, _ = process.communicate(timeout=WAIT)
    assert (process.returncode, told.count("\n")) == (75, 1)
    assert os.listdir(lock.parent) == ["sweep.lock"]
