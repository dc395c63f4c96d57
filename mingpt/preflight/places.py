"""Whether a node can use the run directory, and sees what the others write there. Runs in a helper.

Raises UserError or TransientError if it can't.
"""

from contextlib import suppress

from mingpt.errors import UserError
from mingpt.files.folder import Folder

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


def see(key: str, url: str) -> list[str]:
    """Which nodes' files are in a place."""
    return [name.removeprefix(PROBE) for name in Folder(url, key).entries() if name.startswith(PROBE)]


def clean(places: list[Place], name: str) -> None:
    for key, url in places:
        with suppress(Exception):  # `write` has reported it, or the file was never written
            folder = Folder(url, key)
            folder.fs.rm_file(folder.path(PROBE + name))
