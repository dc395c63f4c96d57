"""What plain torchrun finds of this package by its entry points (pyproject.toml: torchrun.handlers).

torch asks for these while it is being imported itself: what they need of torch is imported when a rendezvous is made.
"""

from collections.abc import Callable
from typing import Any

Creator = Callable[[Any], Any]  # from torch's RendezvousParameters to its RendezvousHandler


def static() -> Creator:
    def create(params: Any) -> Any:
        from mingpt.rendezvous import create_static

        return create_static(params)

    return create


def c10d() -> Creator:
    def create(params: Any) -> Any:
        from mingpt.rendezvous import create_c10d

        return create_c10d(params)

    return create
