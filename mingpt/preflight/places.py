"""Whether a node can use the run directory, and who sees what it writes there. Runs in a helper.

Raises UserError or TransientError if it can't.
"""

from contextlib import suppress
from dataclasses import asdict
from typing import Any

from mingpt.config.schema import Config
from mingpt.errors import UserError
from mingpt.folder import Folder
from mingpt.world.env import Env

PROBE = "preflight-"  # the names of files that nodes write begin with it
Place = tuple[str, str]  # its key in the config, and its URL


def write(places: list[Place], name: str, snapshot_dir: str) -> bool:
    """Write a small file into each place and read it back; returns whether the store has conditional puts."""
    from mingpt.snapshot.store import Store  # which imports torch

    for key, url in places:
        folder, content = Folder(url, key), f"{name}\n".encode()
        folder.write(PROBE + name, content)
        if folder.read(PROBE + name) != content:
            raise UserError(f"{folder.shown}: a file reads back with another content: choose another place")
    return Store(snapshot_dir).conditional_puts


def look(places: list[Place], config: Config, name: str, writers: dict[str, str]) -> dict[str, Any]:
    """What this node tells the others of where the run is (snapshot/home.py: Told). writers: hosts by their name.

    Raises UserError if a bucket does not show here what another node has written. A folder may be one node's alone.
    """
    from mingpt.snapshot.home import HomeSearch, Told  # which imports torch

    seen = list[list[int]]()  # in each place, whose files
    for key, url in places:
        folder = Folder(url, key)
        there = {entry.removeprefix(PROBE) for entry in folder.entries()}
        unseen = [host for other, host in writers.items() if other not in there]
        if unseen and not folder.local:
            raise UserError(
                f"what {', '.join(unseen)} wrote into {key} is not seen here: give a bucket that all nodes share"
            )
        seen.append([rank for rank, other in enumerate(writers) if other in there])
    if "://" in config.snapshot.dir:
        seen.append([*range(len(writers))])
    found = HomeSearch(config)._found() if Folder(config.run.dir).local else {}
    return asdict(Told(writers[name], name, Env.read().head, True, sees_run=seen[0], sees_snapshots=seen[-1], **found))


def home(config: Config, told: list[dict[str, Any]]) -> tuple[list[int], str]:
    """The nodes that will keep the snapshots, by rank; and what is to be said of a run that one node has alone.

    Raises UserError as training would: for two runs under one name, and without the node that has the run.
    """
    from mingpt.snapshot.elsewhere import alone
    from mingpt.snapshot.home import TOLD, choose

    folder = Folder(config.run.dir)
    order, found = choose([TOLD.validate_python(one) for one in told], folder.shown, config.resume.anew)
    return [order[rank] for rank in found.snapshots], alone(folder.url, found.host) if found.host else ""


def clean(places: list[Place], name: str) -> None:
    for key, url in places:
        with suppress(Exception):  # `write` has reported it, or the file was never written
            folder = Folder(url, key)
            folder.fs.rm_file(folder.path(PROBE + name))
