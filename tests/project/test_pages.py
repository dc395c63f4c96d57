"""The commands of docs/time-machine.md and docs/branches.md, executed in order on a run as the pages make it: each ends
with 0, or with the code that the page shows for `echo $?`.
"""

import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
import torch

import lockstep
import mingpt.cli
from mingpt.snapshot.format import Kind
from mingpt.snapshot.store import Store
from paths_kit import ROOT
from rewriting_kit import rewrite

LIMIT = 600  # seconds for one command
FLIPPED = "one bit of step 200's snapshot was flipped"  # what comments ask for before a command
KILLED = re.compile(r"killed at step (\d+)")


def commands(page: str) -> list[tuple[str, str, int]]:
    """Each command of the page's ```console blocks, its comment, and its exit code."""
    text = (ROOT / f"docs/{page}.md").read_text()
    lines = "".join(re.findall(r"^```console\n(.*?)^```", text, re.M | re.S))
    return [
        (command, comment, int(code or 0))
        for command, comment, code in re.findall(
            r"^\$ (mingpt .*?)(?:  # (.*))?$(?:\n(?!\$).*)*(?:\n\$ echo \$\?\n(\d+)$)?", lines, re.M
        )
    ]


def flip() -> None:
    """One bit of one weight, with checksums that fit."""

    def change(state: dict[Kind, dict[str, torch.Tensor]]) -> None:
        state["model"]["model.layers.0.mlp.down_proj.weight"].view(torch.int32)[0, 7] ^= 1 << 30

    rewrite(Store("runs/three/snapshots"), 200, change)


def run(verb: str, arguments: list[str], kill_at: str) -> int:
    if verb not in ("train", "launch"):
        try:
            return mingpt.cli.run(verb, arguments)
        except SystemExit as end:
            return int(end.code or 0)
    process = lockstep.start(
        [sys.executable, "-m", f"mingpt.{verb}", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout
    for line in process.stdout:
        if kill_at and re.match(rf"step +{kill_at}/", line):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait(LIMIT)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_commands_of_the_pages_end_as_the_pages_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made, branches = [commands(page) for page in ("time-machine", "branches")]
    assert [comment for _, comment, _ in made[:3]] == ["killed at step 101", "killed at step 201", ""]
    # The second page's commands need the run as the first page's first ones made it.
    for command, comment, code in [*made[:3], *branches, *made[3:]]:
        if comment == FLIPPED:
            flip()
        program, _, into = command.partition(" > ")
        _, verb, *arguments = shlex.split(program)
        kill_at = "".join(KILLED.findall(comment))
        capfd.readouterr()
        ended = run(verb, arguments, kill_at)
        out, err = capfd.readouterr()
        assert kill_at or ended == code, f"$ {command}\n{out}{err}"
        if into:
            Path(into).write_text(out)
