"""Whether a node can use the run directory, and sees what the others write there. Runs in a helper.

Raises UserError or TransientError if it can't.
"""

from contextlib import suppress

from mingpt import storage
from mingpt.errors import UserError
from mingpt.redact import without_secrets

PROBE = "preflight-"  # the names of files that nodes write begin with it
Place = tuple[str, str]  # its key in the config, and its URL


def write(places: list[Place], name: str, snapshot_dir: str) -> bool:
    """Write a small file into each place and read it back; returns whether the store has conditional puts."""
    from mingpt.snapshot.store import Store  # which imports torch

    for key, url in places:
        fs, path = storage.open_fs(url, key)
        file, content = f"{path.rstrip('/')}/{PROBE}{name}", f"{name}\n".encode()
        with storage.place(key, url):
            storage.make_folder(fs, path)
            fs.pipe_file(file, content)
            if fs.cat_file(file) != content:
                shown = without_secrets(url)
                raise UserError(f"{key}={shown}: a file reads back with another content: choose another place")
    return Store(snapshot_dir).conditional_puts


def see(key: str, url: str) -> list[str]:
    """Which nodes' files are in a place."""
    fs, path = storage.open_fs(url, key)
    with storage.place(key, url):
        names = [storage.name_of(entry) for entry in fs.ls(path, detail=False)]
    return [name.removeprefix(PROBE) for name in names if name.startswith(PROBE)]


def clean(places: list[Place], name: str) -> None:
    for key, url in places:
        with suppress(Exception):  # `write` has reported it, or the file was never written
            fs, path = storage.open_fs(url, key)
            fs.rm_file(f"{path.rstrip('/')}/{PROBE}{name}")
