"""The hot tier: snapshots in a node's shared memory, in the same format. They survive all processes, not the node.

Each run directory has a folder of its own in memory. The folder's name is a hash of the directory's path and of a
random id that is stored in the directory. So a run whose directory was deleted starts afresh, even if a node still has
its hot snapshots, and a copy of the directory does not share them.
"""

import os
import re
import shutil
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from mingpt.errors import UserError
from mingpt.files.folder import Folder
from mingpt.files.localfile import is_own, own_folder
from mingpt.files.storage import name_of, place
from mingpt.snapshot.store import Store

RUN_ID = "run-id"
KEEP = 1
# Age of a killed run's folder before any run may remove it: nothing else ever gives that memory back.
STALE_SECONDS = 86400
SPARE_BYTES = 2**20  # for manifests, headers, scalars
NCCL_BYTES = 2**30  # where NCCL may need the same memory: what its documentation gives a container (--shm-size=1g)


def find_run_id(run_dir: str) -> str | None:
    """The run's random id, if it has one yet. Raises Unreadable, and UserError for a link, a FIFO or a device."""
    found = (Folder(run_dir).read(RUN_ID, most=1024) or b"").decode(errors="replace").strip()
    return found if re.fullmatch("[0-9a-f]{32}", found) else None


def run_id(run_dir: str) -> str:
    """The run's random id; the first attempt creates it. Called by one process."""
    found = find_run_id(run_dir)
    if found is None:
        found = uuid4().hex
        Folder(run_dir).write(RUN_ID, f"{found}\n".encode())
    return found


def folder(hot_dir: str, run_dir: str, identity: str) -> Path:
    """The folder of a run's hot snapshots on each node. identity: the run's id."""
    run = Folder(run_dir)
    resolved = os.path.realpath(run.root) if run.local else run.fs.unstrip_protocol(run.root)
    # By the path alone, a run that was deleted and begun anew would come back from memory.
    key = sha256(f"{resolved} {identity}".encode()).hexdigest()[:32]
    return Path(hot_dir) / f"mingpt-{os.getuid()}" / f"{name_of(resolved) or 'run'}-{key}"


def find_hot(hot_dir: str, run_dir: str, identity: str | None = None) -> Store | None:
    """This node's hot snapshots of a run, if it has a folder for them. identity: if run_dir is not here."""
    identity = identity or find_run_id(run_dir)
    own = folder(hot_dir, run_dir, identity) if identity else None
    return Store(str(own), "snapshot.hot_dir") if own and own.is_dir() and is_own(own.parent) else None


def open_hot(hot_dir: str, run_dir: str, identity: str, state_bytes: int, spare_bytes: int = SPARE_BYTES) -> Store:
    """This node's hot snapshots of a run; makes the folder. Raises UserError if two snapshots don't fit.

    Two must fit, since the older one is deleted when the newer one is complete. state_bytes: the size of one.
    spare_bytes: of this memory, for others.
    """
    own = folder(hot_dir, run_dir, identity)
    base, memory = own.parent, Store(str(own), "snapshot.hot_dir")
    with place("snapshot.hot_dir", hot_dir):
        if not own_folder(base):
            raise UserError(
                f"snapshot.hot_dir={hot_dir}: {base} belongs to another user, or others may write there: "
                "remove it, or choose another folder"
            )
        own.mkdir(exist_ok=True)
        _remove_stale(base, own)  # before the space is measured
        # Committed snapshots make room for the next ones; those that were set aside stay.
        taken = sum(file.size or 0 for step in memory.steps() for file in memory.files(step))
        free, needed = shutil.disk_usage(hot_dir).free + taken, 2 * state_bytes + spare_bytes
    if free < needed:
        raise UserError(
            f"snapshot.hot_dir={hot_dir}: two snapshots take {needed / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB are "
            f"free: give it more (docker: --shm-size), or set snapshot.hot_every_steps=0"
        )
    return memory


def remove(store: Store) -> None:
    """Delete a run's folder with all that is in it."""
    # Errors are ignored: the run's last step is durable, and what is left goes as a stale folder.
    shutil.rmtree(store.root, ignore_errors=True)


def node_identity(hot_dir: str) -> str:
    """Equal for processes that share the memory file system: the same kernel and the same device."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    kernel = boot.read_text().strip() if boot.exists() else os.uname().nodename
    device = os.stat(hot_dir).st_dev if os.path.isdir(hot_dir) else os.getpid()
    return f"{kernel}:{device}"


def _remove_stale(base: Path, own: Path) -> None:
    for other in base.iterdir():
        # Its run may end now, and delete all of it. Path.glob raises when a folder vanishes while it looks: that had
        # ended a run with 64.
        with suppress(FileNotFoundError):
            newest = max(p.stat().st_mtime for p in [other, *other.glob("*")])
            if other != own and time.time() - newest > STALE_SECONDS:
                shutil.rmtree(other, ignore_errors=True)
