"""`python recipes/early.py [--from-env] [overrides]`: the mistakes of a config, before torch is downloaded.

With CUDA torch is 3 GB: a misspelt override should cost seconds of a rented machine. What kinds of models and data
there are is said beside their code, which imports torch, but none of it runs while a config is read. So empty classes
stand for torch, and for whatever else is not installed yet. recipes/setup.sh runs this; the check that counts comes
after.
"""

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
ABSENT = ("argcomplete", "filelock", "jinja2", "numpy", "psutil", "rich", "safetensors", "torch")


class Empty(type):
    """A class that has each attribute it is asked for, and is what comes of calling it: a base, a decorator, a type."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty(name, (), {"stands_in": True})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # a class that derives from it is made as ever
        return cls if "stands_in" in vars(cls) else super().__call__(*args, **kwargs)

    def __getitem__(cls, key: Any) -> Any:  # Tensor[…]
        return cls

    def __or__(cls, other: Any) -> Any:  # Tensor | None
        return cls

    __ror__ = __or__


class EmptyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(Empty("module", (), {}), name)


class Finder:
    """Python asks it first for each module that is not imported yet."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, Finder, is_package=True) if name.partition(".")[0] in ABSENT else None  # type: ignore

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return EmptyModule(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        pass


def main(arguments: list[str]) -> int:
    from mingpt.console import complain
    from mingpt.errors import FINISHED, UserError
    from mingpt.prepare import extras

    try:
        return extras.main(arguments)
    except UserError as error:
        # Code of the user's own derives from torch's classes: whether it does can't be seen here.
        if problems := [problem for problem in error.problems if "_target_" not in problem]:
            raise UserError(*problems) from None
    except Exception as error:  # such code may do anything when it is imported, and is judged after the installation
        complain(f"the config is judged after the installation only: {type(error).__name__}: {error}")
    return FINISHED


if __name__ == "__main__":
    sys.meta_path.insert(0, Finder)
    from mingpt.command import code_of
    from mingpt.console import ended

    sys.exit(ended(code_of(partial(main, sys.argv[1:]))))
