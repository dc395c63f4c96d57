"""The exit codes of a process, and the errors that decide between them."""

import os
from typing import NoReturn

FINISHED = 0  # trained to train.max_steps
USER_ERROR = 64  # the user must change something (EX_USAGE of sysexits.h): retrying cannot help
CRASHED = 70  # a crash or a hang (EX_SOFTWARE): try again
# Stopped on request, after a snapshot if there was anything to store and time for it (EX_TEMPFAIL): start again.
STOPPED = 75


def exit_now(code: int) -> NoReturn:
    """End this process at once, from any thread: no handlers, no clean-up, and nothing that waits for other threads.

    Launchers act on the exit code, and Python's shutdown could replace it by SIGABRT, or never end.
    """
    os._exit(code)


class TransientError(ConnectionError):
    """A disk, bucket or port failed in a way that may pass. Printed without a stack trace; exit 70."""


class UserError(Exception):
    """One or more problems that the user must fix. Printed without a stack trace; exit 64.

    everywhere: all processes of the node raise it, so that one of them prints it for all.
    """

    def __init__(self, *problems: str, everywhere: bool = True) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
        self.everywhere = everywhere

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return f"{len(self.problems)} problems:\n" + "\n".join(f"  {i}. {p}" for i, p in enumerate(self.problems, 1))


class Damaged(Exception):
    """A snapshot's files are damaged, or are no snapshot. The message names the file."""


class Unreadable(TransientError):
    """A disk or a store fails to hand out one file, also after retries. The snapshot may be good, or damaged."""


class OtherFormat(UserError):
    """A whole manifest that another version of this program wrote. Setting it aside would throw that work away."""


# What may be wrong with one of many that are read: it says so, and the others are shown.
OF_ONE = (UserError, Damaged, Unreadable)


class RolledBack(TransientError):
    """The run has gone back to an older snapshot: the next attempt starts from there."""


class Hang(TransientError):
    """No process makes progress. Not raised: the watchdog ends the process, and observers get it in AttemptFailed."""


class SnapshotFailed(Exception):
    """A snapshot could not be stored, for a reason that may pass."""


class Incomplete(TransientError):
    """Files that were written, such as parts of a snapshot, are not there, or have another size."""


class Superseded(UserError):
    """A newer attempt has started, so this one must stop writing."""
