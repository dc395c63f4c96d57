"""Stand-ins for the trials of a sweep: small programs, which write what a run writes and stop as a run stops."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mingpt.commands import sweep
from mingpt.snapshot.files import step_name
from mingpt.sweep import local

WAIT = 600.0  # seconds for what a process is to do: a limit for hangs
STEPS = 6
# Its loss is |log10(lr) + 3| + seed. SAYS: `fail`, `crash`, `hold` (wait to be asked to stop), `ignore`.
TRIAL = """
import json, math, os, pathlib, signal, sys, time
overrides = dict(a.split("=", 1) for a in sys.argv[1:])
folder, asked = pathlib.Path(overrides["run.dir"]), []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
says = json.loads(os.environ["SAYS"]).get(folder.name, "")
if says in ("fail", "crash"):
    sys.exit(64 if says == "fail" else 1)
(folder / "metrics").mkdir(parents=True, exist_ok=True)
number = len(list((folder / "metrics").iterdir())) + 1
loss = abs(math.log10(float(overrides.get("optimizer.lr", "1e-3"))) + 3) + int(overrides.get("seed", "0"))
with open(folder / f"metrics/attempt-{number:05d}.jsonl", "w", buffering=1) as file:
    for step in range(1, STEPS + 1):
        file.write(json.dumps({"step": step, "val_loss": loss}) + chr(10))
        until = time.time() + 600
        while says in ("hold", "ignore") and step == STEPS - 1 and not asked and time.time() < until:
            time.sleep(0.01)
        if asked and says == "ignore":
            time.sleep(60)
        if asked:
            sys.exit(75)
last = folder / "snapshots/STEP_NAME"
last.mkdir(parents=True)
(last / "manifest.json").write_text("{}")
"""


SOURCE = TRIAL.replace("STEP_NAME", step_name(STEPS)).replace("STEPS", str(STEPS))


class Sweeps:
    """Runs `mingpt sweep` with stand-ins; says: what each is to do, by its name with _ for the dash."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        monkeypatch.setattr(local, "command", lambda trial, n: [sys.executable, "-c", SOURCE, *trial.arguments])
        monkeypatch.setattr(local, "LOOK_SECONDS", 0.01)

    def __call__(self, *arguments: str, **says: str) -> int:
        said = {name.replace("_", "-", 1): what for name, what in says.items()}
        self.monkeypatch.setenv("SAYS", json.dumps(said))
        there = [f"data.path={__file__}", f"train.max_steps={STEPS}", "train.eval_every=1"]
        return sweep.main([f"--dir={self.folder}", *there, *arguments])


def wait_for(what: Callable[[], object]) -> None:
    until = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


def has_opened(pid: int, file: str) -> bool:
    with suppress(OSError):
        return any(os.readlink(path) == file for path in Path(f"/proc/{pid}/fd").iterdir())
    return False


def meanwhile(do: Callable[[], object], number: int = signal.SIGTERM) -> None:
    """Does that in a thread, and then asks the sweep in this process to stop, whatever happened."""

    def both() -> None:
        try:
            do()
        finally:
            if callable(signal.getsignal(number)):  # the sweep's; without, it would end the tests
                os.kill(os.getpid(), number)

    threading.Thread(target=both, daemon=True).start()
