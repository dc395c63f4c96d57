"""The commands of docs/time-machine.md and docs/branches.md, executed in order on a run as the pages make it."""

import shutil
from pathlib import Path

import pytest
import torch

from mingpt.snapshot.format import Kind
from mingpt.snapshot.store import Store
from page_kit import Shell, commands, differences, fits
from paths_kit import ROOT
from rewriting_kit import rewrite

MADE = 3  # commands of time-machine.md: they make the run


def test_what_fits() -> None:
    shown = ["digest 0123456789abcdef, loss 1.5", "…", "step   3 …"]
    assert fits(shown, ["digest aaaaaaaaaaaaaaaa, loss 2.25", "step 3 was done"])
    assert fits(shown, ["digest aaaaaaaaaaaaaaaa, loss 2.25", "a", "b", "step 3 x"])
    assert not fits(shown, ["digest aaaaaaaaaaaaaaaa, loss 2.25", "a", "step 4 x"])
    assert not fits(shown, ["digest aaaa, loss 2.25", "step 3 x"])


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the run of the page: attempts with 1, 2 and 3 processes, two of them killed."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for line in commands(ROOT / "docs/time-machine.md")[:MADE]:
            shell = Shell()
            printed = shell.run(line.command)
            assert fits(line.lines, printed), "\n".join(printed)
    return folder


def flip() -> None:
    """One bit of one weight, with checksums that fit."""

    def change(state: dict[Kind, dict[str, torch.Tensor]]) -> None:
        state["model"]["model.layers.0.mlp.down_proj.weight"].view(torch.int32)[0, 7] ^= 1 << 30

    rewrite(Store("runs/three/snapshots"), 200, change)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["time-machine", "branches"])
def test_a_page_shows_what_its_commands_print(
    page: str, three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(three, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    shell = Shell({"one bit of step 200's snapshot was flipped": flip})
    wrong = differences(ROOT / f"docs/{page}.md", shell, after=MADE if page == "time-machine" else 0)
    assert not wrong, "\n\n".join(wrong)
