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


def test_a_sweep_that_is_killed_twice(tmp_path: Path, text: Path, cache: Path) -> None:
    few = (
        "batch.global_size=2",
        "train.max_steps=100",
        "train.log_every=50",
        "train.eval_every=0",
        "snapshot.every_steps=20",
    )
    data = (f"data.path={text}", f"data.cache_dir={cache}")
    first, second = (Run(str(tmp_path / f"sweep/seed-{n}"), text, cache) for n in (1, 2))

    def start(**more: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "mingpt.sweep", *TINY, *few, *data, f"--dir={tmp_path}", "seed=1,2"]
        env = {**os.environ, **more}
        output, errors = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=errors, text=True)

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in Path(first.dir).rglob("*")}

    between = start()
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
    during = start(PYTHONPATH=site, CRASH_AT=str(slow), CRASH_PART_BYTES="40000")
    wait_for(lambda: any(Path(second.dir).glob("snapshots/*/manifest.json")))
    during.kill()
    told, _ = during.communicate(timeout=WAIT)
    with (tmp_path / "sweep/sweep.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which the trial holds until it has stored its snapshot
    assert "1 of 2 trials have finished already" in told
    assert second.store.steps()[0] < 100

    told, _ = start().communicate(timeout=WAIT)
    assert "1 of 2 trials have finished already" in told
    ends = sorted(re.findall(r"^(\d) +(finished) +(\d+) ", told, re.M))
    assert ends == [("1", "finished", "100"), ("2", "finished", "100")]
    assert written() == before
    assert len(list(Path(second.dir).glob("metrics/attempt-*"))) >= 2
    alone = Run(str(tmp_path / "alone"), text, cache)
    alone.finish(1, *few, "seed=2")
    assert second.digest() == alone.digest()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("while_it", ["imports", "waits for the lock"])
def test_a_sweep_that_is_stopped_before_its_first_trial(tmp_path: Path, number: int, while_it: str) -> None:
    lock, imports = tmp_path / "sweep/sweep.lock", tmp_path / "imports"
    if while_it == "imports":
        slow = f"open({str(imports)!r}, 'w'); import signal; signal.pause()"
        (tmp_path / "hydra.py").write_text(slow)
    lock.parent.mkdir()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, "-m", "mingpt.sweep", "experiment=synthetic", f"--dir={tmp_path}", "seed=1,2"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for(lambda: imports.exists() or has_opened(process.pid, str(lock)))
        process.send_signal(number)
        told = process.communicate(timeout=WAIT)
    assert told == ("", "stopped on request: the same command again goes on\n")
    assert process.returncode == 75
    assert os.listdir(lock.parent) == ["sweep.lock"]
