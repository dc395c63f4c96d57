"""The hot tier: snapshots in a node's shared memory, in the same format. They outlive all processes, not the node.

A folder belongs to one run directory: its name is a hash of where that directory is and of a random id that lies in
it. Whoever deletes the directory starts afresh, whatever is left in the memory of some node, and a copy of it has a
folder of its own.
"""

import os
import re
import shutil
import stat
import time
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from mingpt.errors import UserError
from mingpt.plainfile import NotPlain, link_problem, open_file
from mingpt.snapshot.format import MANIFEST
from mingpt.snapshot.store import Store
from mingpt.storage import is_local, make_folder, name_of, open_fs, place

KEEP = 1
STALE_SECONDS = 86400  # after which what a killed run has left is anybody's to remove
SPARE_BYTES = 2**20  # manifests, headers, scalars


def find_run_id(run_dir: str) -> str | None:
    """The run's own random name, if it has one yet. Raises UserError if a link, a FIFO or a device stands there."""
    fs, path = _run_id_path(run_dir)
    with place("run.dir", run_dir):
        try:
            raw = _read_plain(path) if is_local(fs) else fs.cat_file(path)
        except FileNotFoundError:
            return None
        except NotPlain as problem:
            raise UserError(f"run.dir={link_problem(path, str(problem))}") from problem
    found = raw.decode(errors="replace").strip()
    return found if re.fullmatch("[0-9a-f]{32}", found) else None


def run_id(run_dir: str) -> str:
    """The run's own random name, drawn by its first attempt. Called by one process."""
    found = find_run_id(run_dir)
    if found is None:
        found = uuid4().hex
        fs, path = _run_id_path(run_dir)
        with place("run.dir", run_dir):
            make_folder(fs, path.rpartition("/")[0])
            if is_local(fs):
                with open(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
                    file.write(f"{found}\n")
            else:
                fs.pipe_file(path, f"{found}\n".encode())
    return found


def _read_plain(path: str) -> bytes:
    """Its beginning, in which there is all of a name."""
    with open(open_file(path), "rb") as file:
        return file.read(64)


def _run_id_path(run_dir: str) -> tuple[Any, str]:
    fs, root = open_fs(run_dir, "run.dir")
    return fs, f"{root.rstrip('/')}/run-id"


def folder(hot_dir: str, run_dir: str, identity: str) -> Path:
    """Where a node has the hot snapshots of a run. identity: run_id's."""
    fs, path = open_fs(run_dir, "run.dir")
    resolved = os.path.realpath(path) if is_local(fs) else fs.unstrip_protocol(path.rstrip("/"))
    key = sha256(f"{resolved} {identity}".encode()).hexdigest()[:32]
    return Path(hot_dir) / f"mingpt-{os.getuid()}" / f"{name_of(resolved) or 'run'}-{key}"


def find_hot(hot_dir: str, run_dir: str) -> Store | None:
    """This node's folder for a run, if it has one."""
    identity = find_run_id(run_dir)
    own = folder(hot_dir, run_dir, identity) if identity else None
    return Store(str(own), "snapshot.hot_dir") if own and own.is_dir() and _is_ours(own.parent) else None


def _is_ours(base: Path) -> bool:
    about = base.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()


def open_hot(hot_dir: str, run_dir: str, identity: str, state_bytes: int) -> Store:
    """This node's folder for a run, made where it is missing. Raises UserError if there is no place for it.

    Two snapshots must fit: the older one goes when the newer one is complete.
    """
    own = folder(hot_dir, run_dir, identity)
    base = own.parent
    with place("snapshot.hot_dir", hot_dir):
        base.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(base):
            raise UserError(
                f"snapshot.hot_dir={hot_dir}: {base} belongs to somebody else: remove it, or choose another"
            )
        own.mkdir(exist_ok=True)
        _remove_stale(base, own)
        # What is replaced by the next two; what was set aside stays.
        taken = sum(_size(file) for file in own.rglob("*") if (file.parent / MANIFEST).exists())
        free, needed = shutil.disk_usage(hot_dir).free + taken, 2 * state_bytes + SPARE_BYTES
    if free < needed:
        raise UserError(
            f"snapshot.hot_dir={hot_dir}: two snapshots take {needed / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB are "
            f"free: give it more (docker: --shm-size), or set snapshot.hot_every_steps=0"
        )
    return Store(str(own), "snapshot.hot_dir")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:  # another process of this node is tidying up
        return 0


def remove(store: Store) -> None:
    shutil.rmtree(store.root, ignore_errors=True)


def node_identity(hot_dir: str) -> str:
    """Equal for processes that see the same shared memory: one kernel, one file system."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    kernel = boot.read_text().strip() if boot.exists() else os.uname().nodename
    device = os.stat(hot_dir).st_dev if os.path.isdir(hot_dir) else os.getpid()
    return f"{kernel}:{device}"


def _remove_stale(base: Path, own: Path) -> None:
    for other in base.iterdir():
        newest = max((p.stat().st_mtime for p in [other, *other.glob("*")] if p.exists()), default=0.0)
        if other != own and time.time() - newest > STALE_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
