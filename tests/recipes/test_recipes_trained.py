"""What users launch, unmodified: each recipe's run section as real processes, two nodes on loopback."""

import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.kits.node_kit import Node, ask_to_stop, free_port, listening, wait_until
from tests.kits.paths_kit import ROOT
from tests.kits.recipe_kit import DEFAULT, HEAD, OTHER, TEACHING, envs, recipe, sky_variables
from tests.kits.run_kit import TINY, NewRun

pytestmark = pytest.mark.slow
Launch = Callable[..., list[Node]]


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """The folder that a node's commands run in: this repository, with the environment where set-up puts it."""
    folder = tmp_path / "workdir"
    folder.mkdir()
    for name in ("mingpt", "configs", "examples", "recipes", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture
def launch(workdir: Path, text: Path, cache: Path) -> Launch:
    """Starts a recipe's run section on both nodes, the head first: on loopback each could host a rendezvous."""

    def start(
        name: str,
        run: str,
        processes: tuple[int, int] = (2, 1),
        on_line: Mapping[int, Callable[[str], None]] | None = None,
    ) -> list[Node]:
        overrides = " ".join((*TINY, f"data.path={text}", f"data.cache_dir={cache}"))
        changed: dict[str, object] = {"OVERRIDES": overrides, "PREFLIGHT": "0", "RUN_DIR": run}
        nodes, port = list[Node](), free_port()
        for rank in (0, 1):
            env = {**envs(name, **changed, NPROC_PER_NODE=processes[rank]), **sky_variables(rank)}
            hear = (on_line or {}).get(rank, lambda line: None)
            env["PET_MASTER_PORT"] = str(port)
            nodes.append(Node(["bash", "-c", str(recipe(name)["run"])], env, workdir, hear))
            if rank == 0:
                wait_until(lambda: listening(port) or nodes[0].process.poll() is not None, "the head listens")
        return nodes

    return start


def ends(nodes: list[Node]) -> list[int]:
    """The exit codes; fails if a process is left behind."""
    codes = [node.wait() for node in nodes]
    for node in nodes:
        node.assert_nothing_left()
    return codes


def said(nodes: list[Node]) -> str:
    return "".join(node.output for node in nodes)


def stored(line: str) -> bool:
    """From here on a start resumes. (A step's own line does not say so: snapshots are written beside the steps.)"""
    return re.match(r"step \d+: snapshot \w+ in ", line) is not None


@pytest.mark.nightly  # the words: test_recipes.py; what a launcher does with a signal: test_faults.py
def test_train_yaml_stops_when_all_nodes_are_told_to_as_sky_cancel_does_and_resumes_resized(
    launch: Launch, undisturbed: NewRun, new_run: NewRun
) -> None:
    run = new_run()
    nodes: list[Node] = []

    def stop(line: str) -> None:
        if re.match(r"step +7/", line):
            scripts = [node.process.pid for node in nodes]  # they have become torchrun
            ask_to_stop(*scripts, workers=[worker for node in nodes for worker in node.workers()])

    nodes += launch("train", run.dir, (2, 1), on_line={0: stop})
    assert 0 not in ends(nodes), said(nodes)
    assert "stopped on request" in nodes[0].output, said(nodes)
    (stopped_at, *_) = run.store.steps()
    assert 7 <= stopped_at < 24
    nodes = launch("train", run.dir, (1, 2))
    assert ends(nodes) == [0, 0], said(nodes)
    assert f"resumed from step {stopped_at} of " in nodes[0].output
    assert run.digest() == undisturbed(DEFAULT).digest()


@pytest.mark.example
@pytest.mark.parametrize("name", TEACHING)
def test_a_killed_process_is_started_again_in_place(
    name: str, launch: Launch, undisturbed: NewRun, new_run: NewRun
) -> None:
    run = new_run()
    nodes: list[Node] = []
    killed: list[int] = []

    def kill(line: str) -> None:
        if stored(line) and not killed:
            killed.append(nodes[1].workers()[0])
            os.kill(killed[0], signal.SIGKILL)

    nodes += launch(name, run.dir, (2, 1), on_line={0: kill, 1: kill})  # either may have process 0
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
