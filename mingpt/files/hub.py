"""The Hugging Face hub (hf://): how its client behaves here, and the commit that a revision stands for."""

import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

SCHEME = "hf://"
TRIES = 6  # of the client, for each request
NAME = re.compile(r"(?:hf://)?([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w./-]+))?")
OURS = {"data", "runs"}  # folders of the docs: what is missing there has another cure
FOLDERS = {"dataset": "datasets/", "space": "spaces/", "model": ""}


@cache
def set_up(seconds: float) -> None:
    """Have the client tell nobody what it is used for, and wait for each answer for `seconds`, its tries together.

    On its own it waits for a listing without a limit. Raises ImportError if it is not installed.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when the client is imported, both
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import get_session, set_client_factory

    most = seconds / TRIES

    def limit(request: Any) -> None:
        given = request.extensions["timeout"]
        request.extensions["timeout"] = {name: min(value or most, most) for name, value in given.items()}

    first = get_session()
    client, hooks = type(first), {"request": [*first.event_hooks["request"], limit]}
    set_client_factory(lambda: client(event_hooks=hooks, follow_redirects=True))


def pinned(fs: Any, path: str, commits: dict[str, str]) -> str:
    """The URL of a path with its revision as a commit: what is read later is then what is listed now.

    commits: of each repository and revision, the commit; one that is not there is asked for and put there.
    Raises ValueError if the path is not OWNER/NAME[@REVISION]/…, and the client's errors.
    """
    from huggingface_hub import HfApi

    found = fs.resolve_path(path)
    if not hasattr(found, "repo_id"):  # a bucket: it has no revisions
        return f"{SCHEME}{path}"
    root = f"{SCHEME}{found.root}"
    if root not in commits:
        at = HfApi().repo_info(found.repo_id, repo_type=found.repo_type, revision=found.revision)
        commits[root] = str(at.sha)
    return f"{SCHEME}{FOLDERS[found.repo_type]}{found.repo_id}@{commits[root]}/{found.path_in_repo}"


def model_at(url: str) -> tuple[str, str | None] | None:
    """The name and the revision of a model: of hf://OWNER/NAME[@REVISION], or OWNER/NAME where no folder OWNER is."""
    found, (owner, *_) = NAME.fullmatch(url), url.split("/")
    if found is None or (not url.startswith(SCHEME) and (owner in OURS or Path(owner).exists())):
        return None
    return found[1], found[2]


def folder_of(name: str, revision: str | None, files: Sequence[str]) -> str:
    """The folder in the client's cache with those files of a model that the patterns `files` name, and that it has.

    Call `set_up` first. Raises the client's errors.
    """
    from huggingface_hub import snapshot_download

    apart = ["*/*", "consolidated*"]  # some have the same weights in another form
    return str(snapshot_download(name, revision=revision, allow_patterns=[*files], ignore_patterns=apart))
