"""Found by Python at the start of each process of a campaign: a crash at one boundary of a snapshot's writes.

CRASH_AT is a file. While it exists it says `<when> <what> <tier> <victim>`, as in `before manifest hot process`: the
first process that comes there takes the file away and kills itself, or the storage server whose process id is in the
file CRASH_SERVER, and then goes on without it. CRASH_PART_BYTES makes parts small, so that tiny models have several.
"""

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def pass_by(*here: str) -> None:
    armed = Path(os.environ["CRASH_AT"])
    with suppress(FileNotFoundError):
        *where, victim = armed.read_text().split()
        if where != [*here]:
            return
        armed.rename(armed.with_name("taken"))  # by one process only
        if victim == "process":
            os.kill(os.getpid(), signal.SIGKILL)
        server = os.pidfd_open(int(Path(os.environ["CRASH_SERVER"]).read_text()))
        signal.pidfd_send_signal(server, signal.SIGKILL)
        select.select([server], [], [], 10)  # readable: it has ended
        os.close(server)


if "CRASH_AT" in os.environ and "mingpt.train" in sys.orig_argv:
    from mingpt.snapshot.format import Manifest, lay_out
    from mingpt.snapshot.store import Store

    write, commit = Store.write_part, Store.commit

    def tier(store: Store) -> str:
        return "hot" if store.key == "snapshot.hot_dir" else "durable"

    def write_a_part(self: Store, step: int, name: str, content: Any) -> None:
        what = name.rpartition("-")[0]  # model-00001
        pass_by("before", what, tier(self))
        write(self, step, name, content)
        pass_by("after", what, tier(self))

    def write_the_manifest(self: Store, manifest: Manifest) -> bool:
        pass_by("before", "manifest", tier(self))
        is_new = commit(self, manifest)
        pass_by("after", "manifest", tier(self))
        return is_new

    Store.write_part, Store.commit = write_a_part, write_the_manifest  # type: ignore[method-assign]
    lay_out.__defaults__ = (int(os.environ["CRASH_PART_BYTES"]),)
