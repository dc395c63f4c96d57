"""What `mingpt report` does: read the runs, and write the page."""

from argparse import Namespace
from pathlib import Path

from mingpt.cli.console import say
from mingpt.config.configfile import NAME
from mingpt.errors import FINISHED
from mingpt.files.folder import Folder
from mingpt.files.localfile import write_whole
from mingpt.files.storage import place
from mingpt.report.page import page
from mingpt.report.reading import Run
from mingpt.report.runs import rows, runs_of, table


def report_command(options: Namespace) -> int:
    urls, runs = options.urls, list[Run]()
    if len(urls) == 1 and Folder(urls[0], "RUN").read(NAME) is None and (found := rows(urls[0])):
        say(table(found))
        if options.out is None:
            return FINISHED
        runs = runs_of(found)
    runs = runs or [Run(url) for url in urls]
    out = options.out or _beside(runs)
    with place("--out", str(out)):
        write_whole(out, [page(runs).encode(errors="replace")])
    say(f"report: {out}")
    return FINISHED


def _beside(runs: list[Run]) -> Path:
    run = Folder(runs[0].past.folder, "RUN")
    if len(runs) > 1 or not run.local:
        return Path("report.html")
    return Path(run.root if "://" in run.url else runs[0].past.folder) / "report.html"
