"""`python -m mingpt.launch.starts [overrides]`: end a managed job whose starts leave no new snapshot.

mingpt.launch gives up after launch.max_attempts_without_progress attempts in a row without a new snapshot. But SkyPilot
starts a managed job again after each crash, without a limit of number, and on new machines nothing remembers the starts
before: a program that crashes before its first snapshot would rent machines for ever. So the job's first node runs this
before all else. It holds the job's starts to the same number, and keeps them in run.dir, one line a start.
"""

import os
import sys
from functools import partial

from mingpt.cli.command import code_of
from mingpt.errors import FINISHED, UserError
from mingpt.files.folder import Folder
from mingpt.launch.newest import configured, newest

FILE = "attempts/starts"


def main(arguments: list[str], job: str) -> int:
    """Add this start of a job to the run's. Raises UserError if those before it have all been in vain."""
    config = configured(arguments)
    folder = Folder(config.run.dir)
    limit = config.launch.max_attempts_without_progress
    step = newest(config).step
    # Counted when a start begins and by its first node: SkyPilot kills the other nodes as soon as one has failed, so
    # not all see an end, and a machine that dies counts nothing. A job that is launched again has another id, so its
    # starts are counted anew: whoever did that has corrected something.
    start = f"{job} at step {step}\n".encode()
    # Bytes, not text: the file is in a folder that others may write to.
    before = (folder.read(FILE) or b"").splitlines(keepends=True)[-limit:]
    if before == [start] * limit:
        raise UserError(
            f"{limit} starts of this job in a row (launch.max_attempts_without_progress) have left no snapshot after "
            f"step {step}: the reason is in the log of each (sky jobs logs): correct it, then launch the job again"
        )
    folder.write(FILE, b"".join([*before, start]))
    return FINISHED


if __name__ == "__main__":
    sys.exit(code_of(partial(main, sys.argv[1:], os.environ["SKYPILOT_TASK_ID"])))
