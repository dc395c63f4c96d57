"""Hosts that must not take part in a run any more: `run.dir/sick-hosts`, a name a line. People may edit it.

`python -m mingpt.launch.sick [overrides]` prints the newest snapshot's step and these hosts in one line, for
recipes/slurm/job.sh.
"""

import sys
from pathlib import Path

from mingpt.atomic import write_whole
from mingpt.config import compose
from mingpt.config.commandline import given
from mingpt.console import complain, say
from mingpt.errors import USER_ERROR, UserError
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


def main(arguments: list[str]) -> int:
    from mingpt.launch.launcher import newest_step
    from mingpt.launch.torchrun import parse

    try:
        config = compose.configure(tuple(given(parse(arguments))))
        assert config is not None  # the parser has answered --help
        say(" ".join([str(newest_step(config)), *read(config.run.dir)]))
    except UserError as error:
        complain(f"error: {error}")
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
