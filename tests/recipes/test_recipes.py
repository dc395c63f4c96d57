"""What users launch: what SkyPilot itself reads in the recipes, and what they make of their variables."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from config_kit import configured
from mingpt.config import compose
from paths_kit import ROOT
from recipe_kit import BUCKET, DEFAULT, TEACHING, envs, recipe, sky_variables
from told import Told

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


def started(name: str, folder: Path, rank: int = 0, gpus: int = 0, **changed: object) -> tuple[int, str]:
    """The section's exit code, and what is printed: a word a line of what torchrun, or python, gets at last."""
    (folder / ".venv/bin").mkdir(parents=True, exist_ok=True)
    printed = '"$@" "OMP=$OMP_NUM_THREADS" "UNSHARED=$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "PID=$$"'
    before = 'case "$*" in *mingpt.preflight*) echo "$*"; exit ${PREFLIGHT_ENDS_WITH:-0} ;; esac'
    for tool in ("torchrun", "python"):
        stub = folder / ".venv/bin" / tool
        stub.write_text(f'#!/bin/sh\n{before}\nprintf "<%s>\\n" {printed}\nexit 75\n')
        stub.chmod(0o755)
    env = {"PATH": os.environ["PATH"], **envs(name, **BUCKET.get(name, {}) | changed), **sky_variables(rank, gpus)}
    script = folder / "run.sh"  # from a file, as SkyPilot does it
    script.write_text(str(recipe(name)["run"]))
    process = subprocess.Popen(["bash", script], env=env, cwd=folder, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=600)
    return process.returncode, output.replace(f"<PID={process.pid}>", "<this process>")  # it gets SkyPilot's signals


WORDS = {"OVERRIDES": "x=* seed=3", "RUN_DIR": "s3://b/run 1", "EXPERIMENT": "e"}  # the shell leaves them alone


@pytest.mark.parametrize(
    ("name", "rank", "gpus", "changed"),
    [
        *((name, rank, 0, {}) for name in ("train", "train-rdzv", "train-spot", "train-bucket") for rank in (0, 1)),
        *((name, 1, 4, {}) for name in TEACHING),  # a process for each GPU, unless told otherwise
        *((name, 1, 4, {"NPROC_PER_NODE": wish}) for name in TEACHING for wish in ("3", "two")),  # torchrun refuses two
        *((name, 0, 0, WORDS) for name in TEACHING),
        *((name, 0, 0, {"PREFLIGHT": 0}) for name in (*TEACHING, "train-bucket")),
        ("train", 1, 0, {"MASTER_PORT": 1234}),
        ("train-spot", 1, 0, {"RUN": "mine", "NPROC_PER_NODE": 2, "OVERRIDES": "x=* y=1"}),
        ("train-bucket", 1, 0, {"BUCKET_NAME": "my-gcs", "STORE": "gcs", "RUN": "a"}),
        ("generate", 0, 0, {}),
        ("generate", 0, 0, {"RUN_DIR": "s3://b/run 1", "PROMPT": "-- To be", "OPTIONS": "--tokens 3"}),
    ],
    ids=str,
)
def test_what_a_run_section_starts(
    name: str, rank: int, gpus: int, changed: dict[str, object], tmp_path: Path, told: Told
) -> None:
    (tmp_path / "x=y").touch()  # a name that x=* matches
    code, output = started(name, tmp_path, rank, gpus, **changed)
    assert code == 75  # torchrun's
    told(output)


@pytest.mark.parametrize("name", [*TEACHING, "train-bucket"])
def test_nothing_is_trained_on_machines_that_preflight_refuses(name: str, tmp_path: Path) -> None:
    code, output = started(name, tmp_path, PREFLIGHT_ENDS_WITH=64)
    assert (code, "mingpt.preflight" in output, "mingpt.train" in output, "mingpt.launch" in output) == (
        64, True, False, False
    )  # fmt: skip


@pytest.mark.parametrize("name", compose.groups()["experiment"])
def test_evaluate_takes_the_snapshots_of_the_recipes_by_default(name: str, tmp_path: Path) -> None:
    config = configured(f"experiment={name}", *(["data.path=x"] if name in ("finetune", "gpt2_124m") else []))
    _, output = started("evaluate", tmp_path, EXPERIMENT=name)
    assert output.startswith(f"<-m>\n<mingpt.evaluate>\n<{config.run.dir}>\n")
