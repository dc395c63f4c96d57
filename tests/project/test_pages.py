"""The commands of docs/time-machine.md and docs/branches.md, executed in order on a run as the pages make it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from page_kit import Shell, commands, differences
from paths_kit import ROOT
from rewriting_kit import rewrite
from verb_kit import store

MADE = 3  # commands of time-machine.md: they make the run


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the run of the page: attempts with 1, 2 and 3 processes, two of them killed."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert not differences(commands(ROOT / "docs/time-machine.md")[:MADE], Shell())
    return folder


def flip() -> None:
    """One bit of one weight, with checksums that fit."""

    def change(state: Any) -> None:
        state["model"]["model.layers.0.mlp.down_proj.weight"].view(torch.int32)[0, 7] ^= 1 << 30

    rewrite(store("runs/three"), 200, change)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("page", ["time-machine", "branches"])
def test_a_page_shows_what_its_commands_print(
    page: str, three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(three, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    shown = commands(ROOT / f"docs/{page}.md")[MADE if page == "time-machine" else 0 :]
    assert shown
    assert not differences(shown, Shell({"one bit of step 200's snapshot was flipped": flip}))
