"""What users launch: the recipes are read by SkyPilot itself, and run as two nodes on loopback, unmodified."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from mingpt import cli
from node_kit import Node, free_port, listening, wait_until
from run_kit import TINY, Run

ROOT = Path(__file__).resolve().parent.parent
SKY = ROOT / ".venv-sky/bin/python"
RECIPES = ("train", "train-rdzv")
HEAD, OTHER = "127.0.0.1", "127.0.0.2"
DEFAULT = "experiment=shakespeare_10m"

Undisturbed = Callable[..., Run]


def recipe(name: str) -> dict[str, object]:
    loaded = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def envs(name: str, **changed: object) -> dict[str, str]:
    """The recipe's `envs` as SkyPilot sets them, some changed as `--env` does."""
    defaults = recipe(name)["envs"]
    assert isinstance(defaults, dict)
    return {key: str(value) for key, value in {**defaults, **changed}.items()}


def sky_variables(rank: int, gpus: int = 0) -> dict[str, str]:
    """What SkyPilot tells each of two nodes."""
    return {
        "SKYPILOT_NODE_IPS": f"{HEAD}\n{OTHER}",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus),
        "SKYPILOT_TASK_ID": "sky-2026-11-21-06-00-00-000000_train_1",
    }


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """The folder that a node's commands run in: this repository, with the environment where set-up puts it."""
    folder = tmp_path / "workdir"
    folder.mkdir()
    for name in ("mingpt", "configs", "examples", "recipes", "pyproject.toml", "constraints.txt"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


# --- SkyPilot's own reading ---

ASK_SKY = """
import json, sys
connections = []
sys.addaudithook(lambda event, args: connections.append(str(args[1])) if event == "socket.connect" else None)
import sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(json.dumps({
    "name": task.name, "num_nodes": task.num_nodes, "accelerators": resources.accelerators, "workdir": task.workdir,
    "envs": task.envs, "setup": task.setup, "run": task.run, "connections": connections,
}))
"""


def ask_sky(file: Path, home: Path) -> "subprocess.CompletedProcess[str]":
    if not SKY.exists():
        pytest.skip("needs SkyPilot in .venv-sky: make .venv-sky/.installed")
    # A home of its own, so that nothing of the user's is read; no usage collection, so that nothing is sent.
    env = {**os.environ, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    return subprocess.run([SKY, "-c", ASK_SKY, file], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_skypilot_reads_the_recipe_without_sending_anything(name: str, tmp_path: Path) -> None:
    done = ask_sky(ROOT / "recipes" / f"{name}.yaml", tmp_path)
    assert done.returncode == 0, done.stderr
    task = json.loads(done.stdout.splitlines()[-1])
    assert (task["num_nodes"], task["accelerators"], task["workdir"]) == (2, {"L4": 2}, ".")
    assert task["envs"] == envs(name)
    assert task["setup"].strip() == "bash recipes/setup.sh"
    assert task["run"].strip() == str(recipe(name)["run"]).strip()
    assert task["connections"] == []


@pytest.mark.slow
def test_skypilot_names_a_misspelt_key(tmp_path: Path) -> None:
    file = tmp_path / "misspelt.yaml"
    file.write_text((ROOT / "recipes/train.yaml").read_text().replace("num_nodes:", "num_node:"))
    done = ask_sky(file, tmp_path)
    assert done.returncode != 0
    assert "num_node" in done.stderr


def test_the_default_experiment_runs_unedited_on_four_nodes_of_four_gpus() -> None:
    for name in RECIPES:
        assert envs(name)["EXPERIMENT"] == DEFAULT.removeprefix("experiment=")
    config = cli.configure([DEFAULT], world_size=16)
    assert config is not None
    assert config.data == (cli.configure(["data=shakespeare-complete"]) or config).data  # the text that set-up fetches


# --- what a run section makes of its variables; torchrun is a stub that prints its arguments ---


def arguments(name: str, folder: Path, rank: int, gpus: int = 0, **changed: object) -> tuple[list[str], str]:
    """The words that torchrun gets, and everything printed."""
    (folder / ".venv/bin").mkdir(parents=True, exist_ok=True)
    stub = folder / ".venv/bin/torchrun"
    printed = '"$@" "OMP=$OMP_NUM_THREADS" "UNSHARED=$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "PID=$$"'
    stub.write_text(f'#!/bin/sh\nprintf "<%s>\\n" {printed}\nexit 7\n')
    stub.chmod(0o755)
    env = {"PATH": os.environ["PATH"], **envs(name, **changed), **sky_variables(rank, gpus)}
    script = folder / "run.sh"  # from a file, as SkyPilot does it
    script.write_text(str(recipe(name)["run"]))
    process = subprocess.Popen(["bash", script], env=env, cwd=folder, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 7  # the section's exit code is torchrun's
    assert f"<PID={process.pid}>" in output  # and so are its signals
    return re.findall("^<(.*)>$", output, re.M), output


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    ("gpus", "wish", "processes"), [(4, "", 4), (0, "", 1), (4, "3", 3), (0, "2", 2)], ids=["GPUs", "none", "3", "2"]
)
def test_a_process_for_each_gpu_or_one_unless_told_otherwise(
    name: str, gpus: int, wish: str, processes: int, tmp_path: Path
) -> None:
    words, _ = arguments(name, tmp_path, 1, gpus, NPROC_PER_NODE=wish)
    assert f"--nproc_per_node={processes}" in words
    assert f"--local_addr={OTHER}" in words
    assert {"OMP=1", "--shutdown_timeout=300", "--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"} <= set(
        words
    )


@pytest.mark.parametrize("name", RECIPES)
def test_overrides_are_several_words_that_the_shell_leaves_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / "x=y").touch()  # a name that x=* matches
    words, output = arguments(name, tmp_path, 0, OVERRIDES="x=* seed=3", RUN_DIR="s3://b/run 1", EXPERIMENT="e")
    end = words.index("-m")
    assert words[end : end + 6] == ["-m", "mingpt.train", "experiment=e", "run.dir=s3://b/run 1", "x=*", "seed=3"]
    assert f"Starting distributed training, head node: {HEAD}\n" in output
    words, _ = arguments(name, tmp_path, 0)
    assert words[words.index("-m") :][:4] == ["-m", "mingpt.train", DEFAULT, "OMP=1"]  # nothing that is empty


def test_static_ranks_meet_at_the_first_address(tmp_path: Path) -> None:
    for rank in (0, 1):
        words, _ = arguments("train", tmp_path, rank, MASTER_PORT=1234)
        expected = {
            f"--node_rank={rank}",
            f"--master_addr={HEAD}",
            "--master_port=1234",
            "--max_restarts=0",
            "--nnodes=2",
        }
        assert expected <= set(words)


def test_the_head_of_a_c10d_rendezvous_hosts_it_and_calls_itself_localhost(tmp_path: Path) -> None:
    for rank, host, is_host in ((0, "localhost", "true"), (1, HEAD, "false")):
        words, _ = arguments("train-rdzv", tmp_path, rank)
        assert f"--rdzv_endpoint={host}:29500" in words
        assert f"--rdzv_conf=is_host={is_host},join_timeout=600" in words
        assert f"--rdzv_id={sky_variables(0)['SKYPILOT_TASK_ID']}" in words
        assert {"--max_restarts=3", "UNSHARED=1"} <= set(words)


# --- real processes: two nodes on loopback ---


@pytest.fixture
def launch(workdir: Path, text: Path, cache: Path) -> Callable[..., list[Node]]:
    """Starts a recipe's run section on both nodes, the head first: on loopback each could host a rendezvous."""

    def start(
        name: str,
        run: str,
        processes: tuple[int, int] = (2, 1),
        more: str = "",
        on_line: Mapping[int, Callable[[str], None]] | None = None,
        experiment: str = "",
    ) -> list[Node]:
        port = free_port()
        overrides = more if experiment else " ".join((*TINY, f"data.path={text}", f"data.cache_dir={cache}", more))
        nodes: list[Node] = []
        for rank in (0, 1):
            changed = {"OVERRIDES": overrides, "RUN_DIR": run, "NPROC_PER_NODE": processes[rank]}
            changed |= {"EXPERIMENT": experiment} if experiment else {}
            env = envs(name, **changed, **{"MASTER_PORT" if name == "train" else "RDZV_PORT": port})
            hear = (on_line or {}).get(rank, lambda line: None)
            nodes.append(Node(["bash", "-c", str(recipe(name)["run"])], {**env, **sky_variables(rank)}, workdir, hear))
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


@pytest.mark.slow
def test_train_yaml_stops_everywhere_when_one_node_is_told_to_and_resumes_resized(
    launch: Callable[..., list[Node]], undisturbed: Undisturbed, tmp_path: Path, text: Path, cache: Path
) -> None:
    run = Run(str(tmp_path / "run"), text, cache)
    nodes: list[Node] = []

    def stop(line: str) -> None:
        if re.match(r"step +7/", line):
            os.kill(nodes[1].process.pid, signal.SIGTERM)  # the script's own process: it has become torchrun

    nodes += launch("train", run.dir, (2, 1), on_line={0: stop})
    assert 0 not in ends(nodes), said(nodes)
    assert "stopped on request" in nodes[0].output, said(nodes)
    (stopped_at, *_) = run.store.steps()
    assert 7 <= stopped_at < 24
    nodes = launch("train", run.dir, (1, 2))
    assert ends(nodes) == [0, 0], said(nodes)
    assert f"resumed from step {stopped_at} of " in nodes[0].output
    assert f"Starting distributed training, head node: {HEAD}\n" in nodes[1].output
    assert run.digest() == undisturbed(DEFAULT).digest()


@pytest.mark.slow
def test_train_rdzv_yaml_starts_a_killed_process_again(
    launch: Callable[..., list[Node]], undisturbed: Undisturbed, tmp_path: Path, text: Path, cache: Path
) -> None:
    run = Run(str(tmp_path / "run"), text, cache)
    nodes: list[Node] = []
    killed: list[int] = []

    def kill(line: str) -> None:
        if re.match(r"step +7/", line) and not killed:
            killed.append(nodes[1].workers()[0])
            os.kill(killed[0], signal.SIGKILL)

    nodes += launch("train-rdzv", run.dir, (2, 1), on_line={0: kill, 1: kill})  # either may have process 0
    assert ends(nodes) == [0, 0], said(nodes)
    assert killed
    assert "resumed from step 4 of " in said(nodes)
    assert run.digest() == undisturbed(DEFAULT).digest()


@pytest.mark.slow
def test_a_model_of_ones_own_is_trained_by_the_same_recipe(launch: Callable[..., list[Node]], tmp_path: Path) -> None:
    settings = ("train.max_steps=12", "snapshot.hot_every_steps=0")
    alone, two_nodes = (Run(str(tmp_path / name), tmp_path, tmp_path) for name in ("alone", "nodes"))
    command = [sys.executable, "-m", "mingpt.train", "experiment=classifier", f"run.dir={alone.dir}", *settings]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=200)
    nodes = launch("train", two_nodes.dir, more=" ".join(settings), experiment="classifier")
    assert ends(nodes) == [0, 0], said(nodes)
    assert two_nodes.digest() == alone.digest()


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_mistake_in_overrides_ends_both_nodes_and_is_told(
    name: str, launch: Callable[..., list[Node]], tmp_path: Path
) -> None:
    nodes = launch(name, str(tmp_path / "run"), (1, 1), "optimizer.lrate=1")
    assert 0 not in ends(nodes), said(nodes)
    assert "optimizer.lrate is not a key" in said(nodes)


@pytest.mark.slow
def test_the_command_of_by_hand_md_runs_on_two_machines(
    workdir: Path, undisturbed: Undisturbed, tmp_path: Path, text: Path, cache: Path
) -> None:
    run = Run(str(tmp_path / "run"), text, cache)
    page = (ROOT / "docs/by-hand.md").read_text()
    (variables,) = re.findall(r"^```\n(.*?)^```", page, re.M | re.S)
    (command,) = re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)
    overrides = " ".join((DEFAULT, *TINY, f"data.path={text}", f"data.cache_dir={cache}"))
    port = free_port()
    nodes: list[Node] = []
    for me, processes in ((HEAD, 2), (OTHER, 1)):
        own = {"HEAD": HEAD, "ME": me, "NODES": 2, "PROCESSES": processes, "RUN_DIR": run.dir, "PORT": port}
        env = {key: str(value) for key, value in own.items()} | {"OVERRIDES": overrides}
        assert re.findall(r"^(\w+)=", variables, re.M) == list(env)  # the page names what the command needs
        nodes.append(Node(["bash", "-uc", command], env, workdir))
        wait_until(lambda: listening(port), "the head listens")
    assert ends(nodes) == [0, 0], said(nodes)
    assert run.digest() == undisturbed(DEFAULT).digest()
