"""What `mingpt report` does: read the runs, and write the page."""

from pathlib import Path

from mingpt.atomic import write_whole
from mingpt.command import command
from mingpt.config.configfile import NAME
from mingpt.console import say
from mingpt.errors import FINISHED, UserError
from mingpt.folder import Folder
from mingpt.report.__main__ import parser
from mingpt.report.page import page
from mingpt.report.reading import Run
from mingpt.report.runs import rows, table
from mingpt.storage import is_local, open_fs, place

MOST_RUNS = 10  # as many as there are colours


@command()
def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    if (
        len(options.urls) == 1
        and Folder(options.urls[0], "RUN").read(NAME) is None
        and (found := rows(options.urls[0]))
    ):
        say(table(found))
        return FINISHED
    if len(options.urls) > MOST_RUNS:
        raise UserError(f"{len(options.urls)} runs: a report shows at most {MOST_RUNS}: give fewer")
    runs = [Run(url) for url in options.urls]
    out = options.out or _beside(runs)
    with place("--out", str(out)):
        write_whole(out, [page(runs).encode(errors="replace")])
    say(f"report: {out}")
    return FINISHED


def _beside(runs: list[Run]) -> Path:
    fs, path = open_fs(runs[0].past.folder, "RUN")
    if len(runs) > 1 or not is_local(fs):
        return Path("report.html")
    return Path(path if "://" in runs[0].past.folder else runs[0].past.folder) / "report.html"
