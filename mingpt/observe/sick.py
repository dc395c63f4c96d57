"""run.dir/sick-hosts: the hosts on which a process has computed wrongly, a line each. Recipes start without them."""

from collections.abc import Iterable

from mingpt.storage import open_fs, place

NAME = "sick-hosts"


def read_sick(run_dir: str) -> list[str]:
    """The hosts, sorted; none if there is no such file."""
    fs, path = open_fs(run_dir, "run.dir")
    with place("run.dir", run_dir):
        if not fs.exists(f"{path.rstrip('/')}/{NAME}"):
            return []
        raw: bytes = fs.cat_file(f"{path.rstrip('/')}/{NAME}")
    return sorted(filter(None, (line.strip() for line in raw.decode(errors="replace").splitlines())))


def add_sick(run_dir: str, hosts: Iterable[str]) -> None:
    fs, path = open_fs(run_dir, "run.dir")
    all_hosts = sorted({*read_sick(run_dir), *hosts})
    with place("run.dir", run_dir):
        fs.pipe_file(f"{path.rstrip('/')}/{NAME}", "".join(f"{host}\n" for host in all_hosts).encode())
