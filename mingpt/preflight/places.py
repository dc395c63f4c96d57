"""Whether a node can use the run directory, and sees what the others write there. Runs in a helper."""

from typing import Any

from mingpt import storage
from mingpt.errors import TransientError, UserError
from mingpt.redact import without_secrets

PROBE = "preflight-"  # the names of files that nodes write begin with it
Place = tuple[str, str]  # its key in the config, and its URL


def _problems(error: UserError | TransientError) -> list[str]:
    return list(error.problems) if isinstance(error, UserError) else [str(error)]


def write(places: list[Place], name: str, snapshot_dir: str) -> dict[str, Any]:
    """Write a small file into each place and read it back; test whether the snapshots' store has conditional puts."""
    from mingpt.snapshot.store import Store

    problems: list[str] = []
    for key, url in places:
        try:
            fs, path = storage.open_fs(url, key)
            file, content = f"{path.rstrip('/')}/{PROBE}{name}", f"{name}\n".encode()
            with storage.place(key, url):
                storage.make_folder(fs, path)
                fs.pipe_file(file, content)
                if fs.cat_file(file) != content:
                    shown = without_secrets(url)
                    raise UserError(f"{key}={shown}: a file reads back with another content: choose another place")
        except (UserError, TransientError) as error:
            problems += _problems(error)
    conditional = None
    if not problems:
        try:
            conditional = Store(snapshot_dir).conditional_puts
        except (UserError, TransientError) as error:
            problems += _problems(error)
    return {"problems": problems, "conditional": conditional}


def see(key: str, url: str) -> dict[str, Any]:
    """Which nodes' files are in a place."""
    try:
        fs, path = storage.open_fs(url, key)
        with storage.place(key, url):
            names = [entry.rpartition("/")[2] for entry in fs.ls(path, detail=False)]
    except (UserError, TransientError) as error:
        return {"problems": _problems(error), "seen": []}
    return {"problems": [], "seen": [name.removeprefix(PROBE) for name in names if name.startswith(PROBE)]}


def clean(places: list[Place], name: str) -> None:
    for key, url in places:
        try:
            fs, path = storage.open_fs(url, key)
            fs.rm_file(f"{path.rstrip('/')}/{PROBE}{name}")
        except Exception:  # `write` has reported it, or the file was never written
            continue
