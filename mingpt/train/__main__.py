"""`python -m mingpt.train` is `mingpt train`, as torchrun starts it, or the launcher's standby (world/standby.py)."""

import os
from contextlib import suppress

from mingpt.__main__ import main
from mingpt.cli.cli import importing
from mingpt.errors import UserError
from mingpt.world import standby


def imports() -> None:
    with importing(), suppress(UserError):
        import mingpt.train.attempt  # noqa: F401
        from mingpt.compose.compose import configure

        configure(["data=random"])  # Hydra's plugins
        if standby.COMPILES in os.environ:
            import torch._inductor.compile_fx  # noqa: F401


if __name__ == "__main__":
    if standby.PIPE in os.environ:
        standby.serve(imports)
    main("train")
