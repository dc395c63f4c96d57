"""What users launch: what SkyPilot itself reads in the recipes, and what they make of their variables."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from config_kit import configured
from mingpt.config import compose
from paths_kit import ROOT
from recipe_kit import BUCKET, DEFAULT, HEAD, OTHER, TEACHING, envs, recipe, sky_variables

SKY = ROOT / ".venv-sky/bin/python"


# --- SkyPilot's own reading ---

# Reads [[the recipe, what its user gives], …]; prints of each what SkyPilot has made of it, or its error.
ASK_SKY = """
import json, sys
connections = []
sys.addaudithook(lambda event, args: connections.append(str(args[1])) if event == "socket.connect" else None)
import sky
def read(recipe, given):
    secrets = [("VLLM_API_KEY", "k")] if "VLLM_API_KEY" in recipe.get("secrets", {}) else []
    try:
        task = sky.Task.from_yaml_config(recipe, env_overrides=list(given.items()), secrets_overrides=secrets or None)
    except Exception as error:
        return {"error": str(error)}
    return {
        "num_nodes": task.num_nodes, "workdir": task.workdir, "ports": sorted({str(r.ports) for r in task.resources}),
        "accelerators": sorted((r.accelerators or {} for r in task.resources), key=str),
        "spot": sorted(r.use_spot for r in task.resources), "recovery": [r.job_recovery for r in task.resources],
        "autostop": [vars(r.autostop_config) if r.autostop_config else None for r in task.resources],
        "buckets": [[s.name, s.mode.value, [t.value for t in s.stores]] for s in task.storage_mounts.values()],
        "envs": task.envs, "setup": task.setup, "run": task.run, "probe": task.service and task.service.readiness_path,
    }
print(json.dumps([[read(*given) for given in json.load(sys.stdin)], connections]))
"""
GPUS = [{"A10G": 1}, {"L4": 1}, {"L4": 2}]
RECIPES: dict[str, tuple[int, list[dict[str, int]]]] = {
    "train": (2, GPUS),
    "train-rdzv": (2, GPUS),
    "train-bucket": (2, GPUS),
    "train-spot": (2, [{k: n} for k in ("A10G", "L4") for n in (1, 1, 4, 4)]),
    "generate": (1, [{}]),
    "evaluate": (1, GPUS[:2]),
    "serve": (1, GPUS[1:2]),
}
GIT = {"url": "https://github.com/you/mingpt", "ref": "v1"}


@pytest.mark.slow
def test_skypilot_reads_the_recipes_without_sending_anything(tmp_path: Path) -> None:
    if not SKY.exists():
        pytest.skip("needs SkyPilot in .venv-sky: make .venv-sky/.installed")
    wishes = {name: BUCKET.get(name, {"RUN_DIR": "s3://b/run 1"} if name == "serve" else {}) for name in RECIPES}
    cases = [(recipe(name), wish) for name, wish in wishes.items()]
    cases += [({**recipe("serve"), "workdir": GIT}, wishes["serve"])]
    cases += [(recipe("train-spot"), {}), ({**recipe("train"), "num_node": 2}, {})]  # mistakes
    # A home of its own, so that nothing of the user's is read; no usage collection, so that nothing is sent.
    env = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = [str(SKY), "-c", ASK_SKY]
    done = subprocess.run(
        command, input=json.dumps(cases), env=env, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    (*tasks, in_git, no_bucket, misspelt), connections = json.loads(done.stdout.splitlines()[-1])
    assert connections == []
    assert "BUCKET" in no_bucket["error"]  # before it costs anything
    assert "num_node" in misspelt["error"]
    assert in_git["workdir"] == GIT
    for (name, (nodes, accelerators)), task in zip(RECIPES.items(), tasks, strict=True):
        assert (task["num_nodes"], task["accelerators"], task["workdir"]) == (nodes, accelerators, "."), name
        assert task["envs"] == envs(name, **wishes[name])
        assert "bash recipes/setup.sh" in task["setup"]
        assert task["run"].strip() == str(recipe(name)["run"]).strip()
        assert task["buckets"] == ([["my-runs", "MOUNT", ["S3"]]] if name == "train-bucket" else [])
        if name == "train-spot":
            assert task["spot"] == [False] * 4 + [True] * 4
            again = {"recover_on_exit_codes": [70, 75, 143], "max_restarts_on_errors": 0}
            assert all(recovery == recovery | again for recovery in task["recovery"])
        elif name == "serve":
            assert (task["probe"], task["ports"]) == ("/health", ["['8000']"])
        else:  # a managed job's machines end with the job
            assert {(stop["idle_minutes"], stop["down"]) for stop in task["autostop"]} == {(10, True)}


@pytest.mark.parametrize(
    ("ips", "given", "refused"),
    [
        ("a\nb", {}, True),
        ("a\nb", {"RUN_DIR": "runs/mine", "OVERRIDES": "data.path=s3://b/tokens"}, True),
        ("a\nb", {"RUN_DIR": "s3://b/run", "OVERRIDES": "run.dir=runs/mine"}, True),
        ("a\nb", {"RUN_DIR": "/mnt/my shared/run"}, False),
        ("a\nb", {"RUN_DIR": "/mnt/shared/run"}, False),
        ("a\nb", {"RUN_DIR": "s3://b/run"}, False),
        ("a\nb", {"OVERRIDES": "seed=1 run.dir=s3://b/run"}, False),
        ("a\nb", {"SLURM_JOB_ID": "1"}, False),
        ("a", {}, False),
    ],
)
def test_several_machines_without_a_shared_place_end_before_anything_is_installed(
    ips: str, given: dict[str, str], refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "recipes").mkdir()
    script = tmp_path / "recipes/setup.sh"
    text = (ROOT / "recipes/setup.sh").read_text()
    script.write_text(text[: text.index("# Is .venv complete?")] + "echo installing\n")
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "SKYPILOT_SETUP_NODE_IPS": ips, **given}
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == ((64, "") if refused else (0, "installing\n"))
    assert ("--env RUN_DIR=s3://bucket/run1" in done.stderr) is refused


def test_the_default_experiment_runs_unedited_on_four_nodes_of_four_gpus() -> None:
    assert {envs(name)["EXPERIMENT"] for name in TEACHING} == {DEFAULT.removeprefix("experiment=")}
    configured(DEFAULT, world_size=16)


# --- what a run section makes of its variables; torchrun and python are stubs that print their arguments ---


def arguments(name: str, folder: Path, rank: int, gpus: int = 0, **changed: object) -> tuple[list[str], str]:
    """The words that torchrun, or python, gets at last, and everything printed."""
    (folder / ".venv/bin").mkdir(parents=True, exist_ok=True)
    printed = '"$@" "OMP=$OMP_NUM_THREADS" "UNSHARED=$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "PID=$$"'
    before = 'case "$*" in *mingpt.preflight*) echo "$*"; exit ${PREFLIGHT_ENDS_WITH:-0} ;; esac'
    for tool in ("torchrun", "python"):
        stub = folder / ".venv/bin" / tool
        stub.write_text(f'#!/bin/sh\n{before}\nprintf "<%s>\\n" {printed}\nexit 75\n')
        stub.chmod(0o755)
    env = {"PATH": os.environ["PATH"], **envs(name, **changed), **sky_variables(rank, gpus)}
    script = folder / "run.sh"  # from a file, as SkyPilot does it
    script.write_text(str(recipe(name)["run"]))
    process = subprocess.Popen(["bash", script], env=env, cwd=folder, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=600)
    if process.returncode == 64:
        return [], output
    assert process.returncode == 75  # the section's exit code is torchrun's
    assert f"<PID={process.pid}>" in output  # and so are its signals
    return re.findall("^<(.*)>$", output, re.M), output


@pytest.mark.parametrize("name", TEACHING)
@pytest.mark.parametrize(
    ("gpus", "wish", "processes"),
    [(4, "", "4"), (0, "", "1"), (4, "3", "3"), (4, "two", "two")],  # two: torchrun refuses it
)
def test_a_process_for_each_gpu_or_one_unless_told_otherwise(
    name: str, gpus: int, wish: str, processes: str, tmp_path: Path
) -> None:
    words, _ = arguments(name, tmp_path, 1, gpus, NPROC_PER_NODE=wish)
    assert f"--nproc_per_node={processes}" in words
    assert f"--local_addr={OTHER}" in words
    assert {"OMP=1", "--shutdown_timeout=300", "--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"} <= set(
        words
    )


@pytest.mark.parametrize("name", TEACHING)
def test_overrides_are_several_words_that_the_shell_leaves_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / "x=y").touch()  # a name that x=* matches
    words, output = arguments(name, tmp_path, 0, OVERRIDES="x=* seed=3", RUN_DIR="s3://b/run 1", EXPERIMENT="e")
    end = words.index("-m")
    assert words[end : end + 6] == ["-m", "mingpt.train", "experiment=e", "run.dir=s3://b/run 1", "x=*", "seed=3"]
    assert f"Starting distributed training, head node: {HEAD}\n" in output
    words, _ = arguments(name, tmp_path, 0)
    assert words[words.index("-m") :][:4] == ["-m", "mingpt.train", DEFAULT, "OMP=1"]  # nothing that is empty


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        *(("train", rank, f"--node_rank={rank} --master_addr={HEAD} --master_port=1234 --max_restarts=0 --nnodes=2")
          for rank in (0, 1)),
        # The head of a c10d rendezvous hosts it, and calls itself localhost.
        ("train-rdzv", 0, "--rdzv_endpoint=localhost:29500 --rdzv_conf=is_host=true,join_timeout=600"),
        ("train-rdzv", 1, f"--rdzv_endpoint={HEAD}:29500 --rdzv_conf=is_host=false,join_timeout=600 --max_restarts=3"),
        ("train-rdzv", 1, f"--rdzv_id={sky_variables(0)['SKYPILOT_TASK_ID']} UNSHARED=1"),
    ],
)  # fmt: skip
def test_nodes_meet_at_the_first_address(name: str, rank: int, expected: str, tmp_path: Path) -> None:
    port = {"MASTER_PORT": 1234} if name == "train" else {}
    words, _ = arguments(name, tmp_path, rank, **port)
    assert {*expected.split()} <= {*words}


def test_a_managed_job_finds_its_snapshots_by_the_id_that_recoveries_keep(tmp_path: Path) -> None:
    id = sky_variables(0)["SKYPILOT_TASK_ID"]
    words, _ = arguments("train-spot", tmp_path, 1, 0, **BUCKET["train-spot"])
    assert words[:4] == ["-m", "mingpt.launch.managed", DEFAULT, f"run.dir=s3://b/{id}"]
    words, _ = arguments("train-spot", tmp_path, 1, BUCKET="s3://b", RUN="mine", NPROC_PER_NODE=2, OVERRIDES="x=* y=1")
    assert words[:7] == [
        "-m", "mingpt.launch.managed", "--nproc-per-node=2", DEFAULT, "run.dir=s3://b/mine", "x=*", "y=1",
    ]  # fmt: skip


def test_a_bucket_that_skypilot_makes_is_written_by_its_url(tmp_path: Path) -> None:
    words, _ = arguments("train-bucket", tmp_path, 1, 0, **BUCKET["train-bucket"])
    assert words[:4] == ["-m", "mingpt.launch", DEFAULT, "run.dir=s3://my-runs/shakespeare_10m"]
    words, _ = arguments("train-bucket", tmp_path, 1, 0, BUCKET_NAME="my-gcs", STORE="gcs", RUN="a")
    assert words[3] == "run.dir=gs://my-gcs/a"


@pytest.mark.parametrize("name", [*TEACHING, "train-bucket"])
def test_machines_are_looked_at_before_training(name: str, tmp_path: Path) -> None:
    changed = {**BUCKET.get(name, {}), "OVERRIDES": "x=* seed=3"}
    words, output = arguments(name, tmp_path, 0, 0, **changed)
    end = words.index("OMP=1" if name in TEACHING else "OMP=")
    overrides = " ".join(words[words.index(DEFAULT) : end])
    port = {"train": "--rdzv-endpoint=127.0.0.1:8008 ", "train-rdzv": "--rdzv-endpoint=127.0.0.1:29500 "}.get(name, "")
    assert [line for line in output.splitlines() if "preflight" in line] == [f"-m mingpt.preflight {port}{overrides}"]
    assert "mingpt.preflight" not in arguments(name, tmp_path, 0, 0, **changed, PREFLIGHT=0)[1]
    words, output = arguments(name, tmp_path, 0, 0, **changed, PREFLIGHT_ENDS_WITH=64)
    assert words == []  # it found something, and nothing is trained
    assert "mingpt.preflight" in output


def test_evaluate_and_generate_take_the_snapshots_of_the_recipes_by_default(tmp_path: Path) -> None:
    for name in compose.groups()["experiment"]:
        config = configured(f"experiment={name}", *(["data.path=x"] if name in ("finetune", "gpt2_124m") else []))
        words, _ = arguments("evaluate", tmp_path, 0, EXPERIMENT=name)
        assert words[:3] == ["-m", "mingpt.evaluate", config.run.dir]
    words, _ = arguments("generate", tmp_path, 0, RUN_DIR="s3://b/run 1", PROMPT="-- To be", OPTIONS="--tokens 3")
    assert words[:6] == ["-m", "mingpt.generate", "s3://b/run 1", "--prompt=-- To be", "--tokens", "3"]
    words, _ = arguments("generate", tmp_path, 0)
    assert words[:4] == ["-m", "mingpt.generate", "runs/shakespeare-10m", "OMP="]
