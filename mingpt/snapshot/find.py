"""Find the snapshots under a URL that a user gives: RUN, RUN@STEP, a run's snapshots folder, or a step's folder."""

from dataclasses import dataclass

from mingpt.errors import UserError
from mingpt.redact import without_secrets
from mingpt.snapshot.catalog import runs_below
from mingpt.snapshot.files import SNAPSHOTS, STEP_FOLDER
from mingpt.snapshot.store import Store


@dataclass(frozen=True)
class Found:
    """A store and the steps that were asked for, newest first."""

    store: Store
    steps: list[int]


def split_url(url: str) -> tuple[str, int | None]:
    """The URL without the step that it names as `RUN@12000` or as a step's folder, and that step; else None."""
    above, _, step = url.rpartition("@")
    return (above, int(step)) if above and step.isascii() and step.isdecimal() else _split_folder(url)


def _split_folder(url: str) -> tuple[str, int | None]:
    parent, _, last = url.rstrip("/").rpartition("/")
    named = STEP_FOLDER.fullmatch(last)
    return (parent or ("/" if url.startswith("/") else "."), int(named[1])) if named else (url, None)


def run_dir_of(url: str) -> str:
    """The run's directory, of which the snapshots folder or a step's folder may be given.

    Raises UserError for RUN@STEP: what asks for it is about the whole run.
    """
    if split_url(url) != _split_folder(url):
        raise UserError(f"{without_secrets(url)} names one step: give the run's directory")
    above = _split_folder(url)[0].rstrip("/") or "/"
    parent, _, last = above.rpartition("/")
    return (parent or ("/" if "/" in above else ".")) if last == SNAPSHOTS else above


def find(url: str, step: int | None = None, committed: bool = True) -> Found:
    """The snapshots under a URL, or that of `step` alone. committed=False: also folders without a manifest.

    Raises UserError if there are none, or not that of `step`.
    """
    above, named = split_url(url)
    if None not in (named, step) and named != step:
        raise UserError(f"{without_secrets(url)} names step {named}, and --step {step}: leave out one")
    url, step = above, step if named is None else named
    for below in ("", "/snapshots"):
        store = Store(url.rstrip("/") + below if below else url, "URL")
        if steps := store.steps() if committed else store.folders():
            break
    else:
        cure = "check the spelling; give a run's directory, its snapshots folder, or a step's folder"
        if runs_below(url):
            cure = f"`mingpt snapshots list {without_secrets(url)}` shows the runs in there: give one of them"
        raise UserError(f"{without_secrets(url)}: no snapshot is there: {cure}")
    if step is not None:
        if step not in steps:
            raise UserError(f"{store.url}: no snapshot of step {step}; there are {', '.join(map(str, sorted(steps)))}")
        steps = [step]
    return Found(store, steps)
