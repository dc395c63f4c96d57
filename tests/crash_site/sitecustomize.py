"""Found by Python at the start of each process of a campaign: dies at one boundary of a snapshot's writes.

CRASH_AT is `<boundary> <number>`: the boundary (before-part, after-part, before-manifest, after-manifest) at which this
process gets SIGKILL when it comes there for the number-th time. CRASH_ONCE is a file that only one process can create:
the others, and those that are started again, live on.
"""

import os
import signal
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

if "CRASH_AT" in os.environ and "-c" not in sys.argv:
    boundary, number = os.environ["CRASH_AT"].split()
    passed: dict[str, int] = {}

    def pass_by(where: str) -> None:
        passed[where] = passed.get(where, 0) + 1
        if where == boundary and passed[where] == int(number):
            try:
                os.close(os.open(os.environ["CRASH_ONCE"], os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    def instrument(store: Any) -> None:
        def around(name: str, what: str) -> None:
            original = getattr(store, name)

            def with_boundaries(self: Any, *arguments: Any) -> Any:
                pass_by(f"before-{what}")
                result = original(self, *arguments)
                pass_by(f"after-{what}")
                return result

            setattr(store, name, with_boundaries)

        around("write", "part")
        around("commit", "manifest")

    class AfterImport(MetaPathFinder):
        """Instruments mingpt.snapshot.store when it is imported."""

        def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            if fullname != "mingpt.snapshot.store":
                return None
            sys.meta_path.remove(self)
            spec = find_spec(fullname)
            assert spec is not None
            assert spec.loader is not None
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                instrument(module.Store)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, AfterImport())
