"""How a process ends: four exit codes, and the errors that choose between them."""

FINISHED = 0  # trained to train.max_steps
USER_ERROR = 64  # the user must change something (EX_USAGE of sysexits.h): retrying cannot help
CRASHED = 70  # a crash or a hang (EX_SOFTWARE): try again
STOPPED = 75  # stopped on request after a snapshot (EX_TEMPFAIL): start again to go on


class TransientError(ConnectionError):
    """A place (a disk, a bucket) failed in a way that may pass. Shown as it is, without a stack trace; exit 70."""


class UserError(Exception):
    """One or more problems that the user must fix. Shown as they are, without a stack trace; exit 64.

    `everywhere`: whether all processes of a node raise it alike, so that one of them prints it for all.
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
    """A snapshot that is not what its writer wrote, or not one at all; the message names the file."""


class Unreadable(TransientError):
    """A disk that can't give a file back, however often it is asked. Nothing is known of the snapshot."""


class OtherFormat(UserError):
    """A whole manifest that another version of this program wrote. Setting it aside would throw that work away."""


class SnapshotFailed(Exception):
    """The store failed in a way that may pass."""


class Superseded(UserError):
    """A newer attempt has started: this one must not write any more."""
