"""Hosts that must not take part in a run any more: `run.dir/sick-hosts`, a name a line. People may edit it."""

from mingpt.folder import Folder

NAME = "sick-hosts"


def read(run_dir: str) -> list[str]:
    """The hosts, each once, in the order in which they were found."""
    text = (Folder(run_dir).read_or_skip(NAME) or b"").decode(errors="replace")
    return list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))


def add(run_dir: str, host: str) -> None:
    """Add a host. Only one process may do so at a time: an object store can't append."""
    if host not in (hosts := read(run_dir)):
        Folder(run_dir).write(NAME, "".join(f"{name}\n" for name in [*hosts, host]).encode())
