"""The `mingpt` command. Ctrl-C and SIGTERM end it at once, whatever it imports.

Python's own way, an exception in the main thread, ends in a stack trace, in another error or nowhere if it comes while
a library is imported.
"""

import signal
import sys
from types import FrameType

from mingpt.errors import STOPPED, exit_now

# What a platform starts again after STOPPED, also before any step.
_code = STOPPED if {"train", "launch"}.intersection(sys.argv[1:2]) else None


def _end(number: int, frame: FrameType | None) -> None:
    exit_now(_code or 128 + number)


for _number in (signal.SIGINT, signal.SIGTERM):  # until Lifetime.begin in cli/cli.py
    # Not in a process that multiprocessing has spawned, which imports this, too: its parent may end it in C code.
    if signal.getsignal(_number) is not signal.SIG_IGN and "multiprocessing.spawn" not in sys.modules:
        signal.signal(_number, _end)

from mingpt.cli.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
