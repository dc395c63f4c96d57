"""What users launch, unmodified: each recipe's run section as real processes, two nodes on loopback."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.kits.node_kit import Node, free_port, listening, wait_until
from tests.kits.paths_kit import ROOT
from tests.kits.recipe_kit import DEFAULT, HEAD, OTHER, TEACHING, envs, recipe, sky_variables
from tests.kits.run_kit import TINY, NewRun

pytestmark = pytest.mark.slow


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """The folder that a node's commands run in: this repository, with the environment where set-up puts it."""
    folder = tmp_path / "workdir"
    folder.mkdir()
    for name in ("mingpt", "configs", "examples", "recipes", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def ends(nodes: list[Node]) -> list[int]:
    """The exit codes; fails if a process is left behind."""
    codes = [node.wait() for node in nodes]
    for node in nodes:
        node.assert_nothing_left()
    return codes


def said(nodes: list[Node]) -> str:
    return "".join(node.output for node in nodes)


@pytest.mark.example
@pytest.mark.parametrize("name", TEACHING)
def test_a_killed_process_is_started_again_in_place(
    name: str, workdir: Path, undisturbed: NewRun, new_run: NewRun, text: Path, cache: Path
) -> None:
    run = new_run()
    nodes: list[Node] = []
    killed: list[int] = []

    def kill(line: str) -> None:
        """By either node, which may have process 0. (A step's own line does not say that a start resumes there.)"""
        if re.match(r"step \d+: snapshot \w+ in ", line) and not killed:
            killed.append(nodes[1].workers()[0])
            os.kill(killed[0], signal.SIGKILL)

    overrides = " ".join((*TINY, f"data.path={text}", f"data.cache_dir={cache}"))
    port = free_port()
    for rank, processes in enumerate((2, 1)):
        changed = {"OVERRIDES": overrides, "PREFLIGHT": 0, "RUN_DIR": run.dir, "NPROC_PER_NODE": processes}
        env = {**envs(name, **changed), **sky_variables(rank), "PET_MASTER_PORT": str(port)}
        nodes.append(Node(["bash", "-c", str(recipe(name)["run"])], env, workdir, kill))
        # The head first: on loopback each could host a rendezvous.
        wait_until(lambda: listening(port) or nodes[0].process.poll() is not None, "the head listens")
    assert ends(nodes) == [0, 0], said(nodes)
    assert killed
    assert re.search(r"resumed from step \d+ of ", said(nodes))
    assert run.digest() == undisturbed(DEFAULT).digest()


@pytest.mark.nightly
def test_the_command_of_by_hand_md_runs_on_two_machines(
    workdir: Path, undisturbed: NewRun, new_run: NewRun, text: Path, cache: Path
) -> None:
    run = new_run()
    page = (ROOT / "docs/by-hand.md").read_text()
    (variables,) = re.findall(r"^```text\n(HEAD=.*?)^```", page, re.M | re.S)
    (command,) = re.findall(r"^```bash\n(OMP_NUM_THREADS.*?)^```", page, re.M | re.S)
    overrides = " ".join((DEFAULT, *TINY, f"data.path={text}", f"data.cache_dir={cache}"))
    port = free_port()
    nodes: list[Node] = []
    for number, (me, processes) in enumerate(((HEAD, 2), (OTHER, 1))):
        own = {"HEAD": HEAD, "ME": me, "NUMBER": number, "NODES": 2, "PROCESSES": processes, "RUN_DIR": run.dir}
        env = {key: str(value) for key, value in (own | {"PORT": port, "OVERRIDES": overrides}).items()}
        assert re.findall(r"^(\w+)=", variables, re.M) == list(env)  # the page names what the command needs
        nodes.append(Node(["bash", "-uc", command], env, workdir))
    assert ends(nodes) == [0, 0], said(nodes)
    assert run.digest() == undisturbed(DEFAULT).digest()
