"""Hosts that must not take part in a run any more: `run.dir/sick-hosts`, a name a line. People may edit it."""

from pathlib import Path

from mingpt.atomic import write_whole
from mingpt.storage import is_local, open_fs, place

NAME = "sick-hosts"


def read(run_dir: str) -> list[str]:
    """The hosts, each once, in the order in which they were found."""
    fs, path = open_fs(url := f"{run_dir.rstrip('/')}/{NAME}", "run.dir")
    try:
        with place("run.dir", url):
            text = fs.cat_file(path).decode(errors="replace") if fs.exists(path) else ""
    except FileNotFoundError:
        text = ""
    return list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))


def add(run_dir: str, host: str) -> None:
    """Add a host. Only one process may do so at a time: an object store can't append."""
    if host in (hosts := read(run_dir)):
        return
    content = "".join(f"{name}\n" for name in [*hosts, host]).encode()
    fs, path = open_fs(url := f"{run_dir.rstrip('/')}/{NAME}", "run.dir")
    with place("run.dir", url):
        if is_local(fs):
            write_whole(Path(path), [content])
        else:
            fs.pipe_file(path, content)
