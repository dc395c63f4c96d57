"""The entry points through which torchrun finds our rendezvous backends (pyproject.toml: torchrun.handlers).

torch loads them during its own import, so they import torch only when a rendezvous is created.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

Creator = Callable[[Any], Any]  # from torch's RendezvousParameters to its RendezvousHandler


def _static(params: Any) -> Any:
    return import_module("mingpt.world.rendezvous").create_static(params)


def _c10d(params: Any) -> Any:
    return import_module("mingpt.world.rendezvous").create_c10d(params)


def static() -> Creator:
    return _static


def c10d() -> Creator:
    return _c10d
