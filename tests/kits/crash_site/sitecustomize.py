"""Found by Python at the start of each process of a campaign: a crash at one boundary of a snapshot's writes.

CRASH_AT is a file. While it exists it says `<when> <what> <tier> <victim>`, as in `before manifest hot process`: the
first process that comes there takes the file away and kills itself, or the storage server whose process id is in the
file CRASH_SERVER, and then goes on without it, or (victim slow) goes on after SLOW_SECONDS. CRASH_PART_BYTES makes
parts small, so that tiny models have several.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SLOW_SECONDS = 10


def crash(victim: str) -> None:
    if victim == "slow":
        time.sleep(SLOW_SECONDS)
        return
    if victim == "process":
        os.kill(os.getpid(), signal.SIGKILL)
    server = os.pidfd_open(int(Path(os.environ["CRASH_SERVER"]).read_text()))
    signal.pidfd_send_signal(server, signal.SIGKILL)
    select.select([server], [], [], 10)  # readable: it has ended
    os.close(server)


def pass_by(when: str, what: str, tier: str) -> None:
    armed = Path(os.environ["CRASH_AT"])
    try:
        *where, victim = armed.read_text().split()
        if where != [when, what, tier]:
            return
        armed.rename(armed.with_name("taken"))  # by one process only
    except FileNotFoundError:
        return
    crash(victim)


def instrument_store(module: Any) -> None:
    def around(method: str, what: Callable[..., str]) -> None:
        original = getattr(module.Store, method)

        def with_boundaries(self: Any, *arguments: Any) -> Any:
            tier = "hot" if self.key == "snapshot.hot_dir" else "durable"
            pass_by("before", what(*arguments), tier)
            result = original(self, *arguments)
            pass_by("after", what(*arguments), tier)
            return result

        setattr(module.Store, method, with_boundaries)

    around("write", lambda step, name, pieces: name.rpartition("-")[0])  # model-00001
    around("commit", lambda step, manifest: "manifest")


def make_parts_small(module: Any) -> None:
    module.lay_out.__defaults__ = (int(os.environ["CRASH_PART_BYTES"]),)


class AfterImport(MetaPathFinder):
    """Changes modules of mingpt when they are imported."""

    def __init__(self) -> None:
        self.changes = {
            "mingpt.snapshot.store": instrument_store,
            "mingpt.snapshot.format": make_parts_small,
        }

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        change = self.changes.pop(fullname, None)
        if change is None:
            return None
        spec = find_spec(fullname)  # without us: the change is no longer ours to make
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "CRASH_AT" in os.environ and "-c" not in sys.argv:
    sys.meta_path.insert(0, AfterImport())
