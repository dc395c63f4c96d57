"""What `mingpt report` does: read the runs, draw, write the page and the pictures."""

import io
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from mingpt.atomic import write_whole
from mingpt.command import command
from mingpt.console import complain, say
from mingpt.data.images.imagetokens import ImageTokens
from mingpt.errors import FINISHED, UserError
from mingpt.report.__main__ import parser
from mingpt.report.reading import Run, read_run
from mingpt.storage import install, is_local, open_fs, place
from mingpt.sweep.record import read_record, rows, table

MOST_RUNS = 10  # as many as there are colours


@command()
def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    if find_spec("matplotlib") is None:
        raise UserError(f"mingpt report draws with matplotlib, which is not installed: {install('report')}")
    if len(options.urls) == 1 and (trials := read_record(options.urls[0])) is not None:
        say(table(rows(options.urls[0], trials)))
        say("pictures of a search: optuna-dashboard (docs/sweeps.md); of trials: mingpt report with their folders")
        return FINISHED
    if len(options.urls) > MOST_RUNS:
        raise UserError(f"{len(options.urls)} runs: a report shows at most {MOST_RUNS}: give fewer")
    runs = [read_run(url) for url in options.urls]
    out = options.out or _beside(runs)

    from mingpt.report import figures, page  # after the check: they import matplotlib

    drawn = figures.pictures(runs)
    content = page.page(runs, drawn, [_sample(run) if options.sample else None for run in runs])
    with place("--out", str(out)):
        write_whole(out, [content.encode(errors="replace")])
    say(f"report: {out}")
    if options.png:
        with place("--png", str(options.png)):
            for name, figure in drawn.items():
                figures.png(figure, options.png / f"{name}.png")
        say(f"pictures: {len(drawn)} in {options.png}")
    return FINISHED


def _beside(runs: list[Run]) -> Path:
    fs, path = open_fs(runs[0].folder, "RUN")
    if len(runs) > 1 or not is_local(fs):
        return Path("report.html")
    return Path(path if "://" in runs[0].folder else runs[0].folder) / "report.html"


def _sample(run: Run) -> str | bytes | None:
    """What the newest snapshot's model writes, or draws (a PNG)."""
    from mingpt.commands import generate, loading  # which need torch's models

    try:
        opened, text = loading.open_model(run.folder), io.StringIO()
        with TemporaryDirectory() as folder, redirect_stdout(text):
            out = Path(folder) / "sample.png"
            draws = isinstance(opened.vocabulary, ImageTokens)
            how = ("--out", str(out), "--each", "4") if draws else ("--tokens", "300")
            generate.generate(opened, generate.parser().parse_args([run.folder, *how]))
            return out.read_bytes() if draws else text.getvalue()
    except UserError as error:  # a model that neither writes nor draws, or no snapshot so far
        complain(f"no sample: {error}")
        return None
