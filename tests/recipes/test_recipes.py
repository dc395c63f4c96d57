"""What users launch: what SkyPilot itself reads in the recipes, and what they make of their variables."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from mingpt.cli.command import expanded
from mingpt.errors import UserError
from mingpt.prepare import extras
from mingpt.prepare.extras import check_machines
from tests.kits.config_kit import configured, problems
from tests.kits.paths_kit import ROOT, ran
from tests.kits.recipe_kit import DEFAULT, HEAD, OTHER, REQUIRED, TEACHING, envs, recipe, sky_variables
from tests.kits.told import Told
from tests.kits.verb_kit import mingpt

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
        "spot": sorted(r.use_spot for r in task.resources), "recovery": [r.job_recovery for r in task.resources],
        "autostop": [vars(r.autostop_config) if r.autostop_config else None for r in task.resources],
        "resources": [
            [r.network_tier, r.disk_size, r.max_hourly_cost] for r in task.resources
        ],
        "volumes": task.volumes, "hooks": [r.hooks for r in task.resources],
        "envs": task.envs, "setup": task.setup, "run": task.run, "probe": task.service and task.service.readiness_path,
    }
print(json.dumps([[read(*given) for given in json.load(sys.stdin)], connections]))
"""
RECIPES = {
    "train": 1,
    "train-rdzv": 2,
    "train-spot": 2,
    "generate": 1,
    "evaluate": 1,
    "serve": 1,
    "prepare": 1,
    "nccl-test": 2,
}  # and their nodes
IDLE = {"train": 60, "train-rdzv": 60}  # minutes: a run may lie on the head's disk
GIT = {"url": "https://github.com/you/mingpt", "ref": "v1"}


@pytest.mark.slow
def test_skypilot_reads_the_recipes_without_sending_anything(tmp_path: Path) -> None:
    if not SKY.exists():
        pytest.skip("needs SkyPilot in .venv-sky: make .venv-sky/.installed")
    wishes = {name: REQUIRED.get(name, {}) for name in RECIPES}
    cases = [(recipe(name), wish) for name, wish in wishes.items()]
    cases += [({**recipe("serve"), "workdir": GIT}, wishes["serve"])]
    page = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/skypilot.md").read_text(), re.M | re.S)
    copies = [*map(yaml.safe_load, page), {"volumes": {"/runs": "my-volume"}}]
    assert [*map(list, copies)] == [
        ["resources"], ["pool", "resources", "workdir", "setup"], ["config"], ["volumes"]
    ]  # fmt: skip
    cases += [({**recipe("train"), **copy}, {}) for copy in copies]
    cases += [(recipe("train-spot"), {}), ({**recipe("train"), "num_node": 2}, {})]  # mistakes
    # A home of its own, so that nothing of the user's is read; no usage collection, so that nothing is sent.
    env = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = [str(SKY), "-c", ASK_SKY]
    done = ran(command, input=json.dumps(cases), env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (*tasks, in_git, resources, pool, hooks, volume, no_bucket, misspelt), connections = json.loads(
        done.stdout.splitlines()[-1]
    )
    assert connections == []
    assert "RUN_DIR" in no_bucket["error"]  # before it costs anything
    assert "num_node" in misspelt["error"]
    assert in_git["workdir"] == GIT
    assert resources["resources"] == [[None, 256, 100]]
    assert {event for (hook,) in hooks["hooks"] for event in hook["events"]} == {"preemption"}
    assert pool["probe"] is not None  # SkyPilot keeps a pool as a service
    assert volume["volumes"] == {"/runs": "my-volume"}
    for (name, nodes), task in zip(RECIPES.items(), tasks, strict=True):
        assert (task["num_nodes"], task["workdir"]) == (nodes, "."), name
        assert task["envs"].items() <= envs(name, **wishes[name]).items()
        if name not in ("prepare", "nccl-test"):
            assert task["envs"].keys() >= {"EXPERIMENT", "RUN_DIR", "OVERRIDES"}
        assert "bash recipes/setup.sh" in task["setup"]
        assert task["run"].strip() == str(recipe(name)["run"]).strip()
        if name == "train-spot":
            assert task["spot"] == [False] * 2 + [True] * 2
            again = {"recover_on_exit_codes": [70, 75, 143], "max_restarts_on_errors": 0}
            assert all(recovery == recovery | again for recovery in task["recovery"])
        elif name == "serve":
            assert (task["probe"], task["ports"]) == ("/health", ["['8000']"])
        else:  # a managed job's machines end with the job
            assert {(stop["idle_minutes"], stop["down"]) for stop in task["autostop"]} == {(IDLE.get(name, 10), True)}


def test_what_plan_answers_on_the_page() -> None:
    page = (ROOT / "docs/skypilot.md").read_text()
    ((words, answer),) = re.findall(r"^\$ mingpt (plan .*)\n(error: .*\n)", page, re.M)
    assert mingpt.refused(words) == answer


@pytest.mark.parametrize("name", ["docs/large.md", "docs/skypilot.md"])
def test_the_pages_tell_when_a_cluster_ends(name: str) -> None:
    text = " ".join((ROOT / name).read_text().split())
    assert "an hour after its last job" in text
    assert IDLE["train"] == 60


def test_set_up_says_that_one_machine_has_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], told: Told
) -> None:
    monkeypatch.setenv("SKYPILOT_SETUP_NODE_IPS", "a\nb")
    for name in ("SLURM_JOB_ID", "SKY_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    said = []
    for run_dir in ("runs/mine", "/mnt/shared/run", "s3://b/run"):
        assert extras.main([DEFAULT, f"run.dir={run_dir}"]) == 0
        said.append(capsys.readouterr())
    assert [len(of.err.splitlines()) for of in said] == [1, 0, 0]
    assert said[0].out == said[1].out  # which names packages, one a line
    told(said[0].err)
    (tmp_path / ".sky").mkdir()
    (tmp_path / ".sky/.sky_slurm_cluster").touch()
    # Where all nodes share a home, as Slurm's do; and where there is one.
    for name, value in {"SLURM_JOB_ID": "1", "SKY_RUNTIME_DIR": str(tmp_path), "SKYPILOT_SETUP_NODE_IPS": "a"}.items():
        check_machines(configured(DEFAULT), {"SKYPILOT_SETUP_NODE_IPS": "a\nb", name: value})
        assert capsys.readouterr().err == "", name


# --- the variables of a recipe, as overrides ---


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, []),
        ({"EXPERIMENT": "e", "RUN_DIR": "s3://b/day=1, a", "OVERRIDES": "a=1  b=[1,2]"},
         ["experiment=e", "run.dir='s3://b/day=1, a'", "a=1", "b=[1,2]"]),
        ({"OVERRIDES": """run.name='a b=c' data.path="x y"/z x=* 'it'"""},
         ["run.name='a b=c'", 'data.path="x y"/z', "x=*", "'it'"]),
        ({"OVERRIDES": r"run.name='it\'s a=b' seed=1"}, [r"run.name='it\'s a=b'", "seed=1"]),
        ({"RUN_DIR": "it's"}, [r"run.dir='it\'s'"]),
        ({"OVERRIDES": "run.dir=b", "RUN_DIR": "a"}, ["run.dir='a'", "run.dir=b"]),  # Hydra takes the last
        ({"NPROC_PER_NODE": "2"}, ["--nproc-per-node=2"]),
    ],
)  # fmt: skip
def test_the_variables_of_a_recipe_are_overrides(given: dict[str, str], words: list[str]) -> None:
    assert expanded("launch", ["a=0", "--from-env", "b=0"], given) == ["a=0", *words, "b=0"]
    assert expanded("launch", ["a=0"], given) == ["a=0"]
    with pytest.raises(UserError, match=r"^OVERRIDES=run\.name='a b: a quote is not closed"):
        expanded("launch", ["--from-env"], given | {"OVERRIDES": "run.name='a b"})


def test_evaluate_takes_a_run_and_what_is_other_on_this_machine() -> None:
    given = {"EXPERIMENT": "e", "RUN_DIR": "s3://b/run 1", "OVERRIDES": "data.path='a b'"}
    assert expanded("evaluate", ["--from-env", "--json"], given) == ["s3://b/run 1", "data.path='a b'", "--json"]


def test_values_reach_the_config_as_a_user_has_written_them(tmp_path: Path) -> None:
    given = {"RUN_DIR": f"{tmp_path}/day=1, a", "OVERRIDES": "data.path='a, b=c' train.max_steps=7"}
    config = configured(*expanded("train", ["--from-env"], given | {"EXPERIMENT": "shakespeare_10m"}))
    path = getattr(config.data, "path", "")
    assert (config.run.dir, path, config.train.max_steps) == (f"{tmp_path}/day=1, a", "a, b=c", 7)


def test_the_default_experiment_runs_unedited_on_four_nodes_of_four_gpus() -> None:
    assert {envs(name)["EXPERIMENT"] for name in TEACHING} == {DEFAULT.removeprefix("experiment=")}
    configured(DEFAULT, world_size=16)


# A host's time for a microbatch of this model that is launched kernel by kernel, in seconds: half of what the 12 blocks
# of GPT-2 took without the compiler (docs/gpus.md). As a CUDA graph a microbatch takes it about a hundredth of that.
HOST = 0.03


def test_the_default_run_takes_no_longer_than_its_recipe_says() -> None:
    head = (ROOT / "recipes/train.yaml").read_text()
    assert "the default run: ten minutes at most, an estimate" in head
    config = configured(DEFAULT)
    assert config.precision == "bf16"  # which the head says, with what to do where the machine has none
    assert "OVERRIDES=precision=fp32" in head
    microbatches = config.batch.global_size // config.batch.micro_size
    assert config.train.max_steps * microbatches * HOST <= 600
    planned = mingpt(f"plan {DEFAULT} data=random data.vocabulary=100 --gpus L4:1")
    minutes = re.search(r": ([0-9]+) min [0-9]+ s of computing", planned)
    assert minutes
    assert int(minutes[1]) < 10


# --- stores that SkyPilot gives schemes of their own ---


def test_a_store_that_speaks_s3_is_refused_with_the_form_that_works(told: Told) -> None:
    urls = ("r2://bucket/run1", "nebius://bucket/run1", "oci://bucket/run1", "cw://bucket/run1")
    told(text for url in (*urls, "cos://us-east/bucket/run1") for text in problems(DEFAULT, f"run.dir={url}"))


# --- what a run section makes of its variables; torchrun and mingpt are stubs that print their arguments ---


VARIABLES = ("RUN_DIR", "OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "PET_MAX_RESTARTS")


def shown(**variables: str) -> list[str]:
    """What the stubs print after their arguments: these variables, all others empty, and the process that it is."""
    return [*(f"<{variable}={variables.get(variable, '')}>" for variable in VARIABLES), "<this process>"]


def started(name: str, folder: Path, rank: int = 0, gpus: int = 0, **changed: object) -> tuple[int, str]:
    """The section's exit code, and what is printed: a word a line of what torchrun, or mingpt, gets at last."""
    (folder / ".venv/bin").mkdir(parents=True, exist_ok=True)
    printed = " ".join(f'"{variable}=${variable}"' for variable in VARIABLES) + ' "PID=$$"'
    before = 'case "$*" in preflight*|export*) echo "$*"; exit ${PREFLIGHT_ENDS_WITH:-0} ;; esac'
    for tool in ("torchrun", "mingpt", "lm_eval"):
        stub = folder / ".venv/bin" / tool
        stub.write_text(f'#!/bin/sh\n{before}\nprintf "<%s>\\n" "$@" {printed}\nexit 75\n')
        stub.chmod(0o755)
    env = {"PATH": os.environ["PATH"], **envs(name, **REQUIRED.get(name, {}) | changed), **sky_variables(rank, gpus)}
    script = folder / "run.sh"  # from a file, as SkyPilot does it
    script.write_text(str(recipe(name)["run"]))
    process = subprocess.Popen(["bash", script], env=env, cwd=folder, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=600)
    return process.returncode, output.replace(f"<PID={process.pid}>", "<this process>")  # it gets SkyPilot's signals


OPTIONS = (
    "--max_restarts=3", "--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "--shutdown_timeout=300",
    "-m", "mingpt.train", "--from-env",
)  # fmt: skip
RUN = "s3://b/run 1"
ID = "sky-2026-11-21-06-00-00-000000_train_1"


def torchrun(name: str, rank: int, processes: int, *rest: str) -> list[str]:
    """The words of a recipe's torchrun on one of two nodes."""
    own, each = f"--local_addr={OTHER if rank else HEAD}", f"--nproc_per_node={processes}"
    if name != "train-rdzv":
        return ["--nnodes=2", f"--node_rank={rank}", each, f"--master_addr={HEAD}", own, *rest]
    conf = f"--rdzv_conf=is_host={'false' if rank else 'true'},join_timeout=300,read_timeout=300"
    endpoint = f"--rdzv_endpoint={HEAD}:29500"
    return ["--nnodes=2", f"--rdzv_id={ID}", "--rdzv_backend=c10d", each, endpoint, conf, own, *rest]


@pytest.mark.parametrize("name", TEACHING)
@pytest.mark.parametrize(
    ("rank", "gpus", "changed", "processes"),
    [(0, 0, {}, 1), (1, 10, {}, 10), (1, 4, {"NPROC_PER_NODE": "3"}, 3)],
    ids=str,
)
def test_torchruns_words(
    name: str, rank: int, gpus: int, changed: dict[str, object], processes: int, tmp_path: Path
) -> None:
    """A process for each GPU, unless told otherwise."""
    code, output = started(name, tmp_path, rank, gpus, **changed)
    assert code == 75  # torchrun's
    assert output.splitlines() == [
        "preflight --from-env --master-port=29500",
        *(f"<{word}>" for word in torchrun(name, rank, processes, *OPTIONS)),
        *shown(OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1" if name == "train-rdzv" else ""),
    ]


@pytest.mark.parametrize(
    ("name", "rank", "gpus", "changed", "words"),
    [
        ("train-spot", 1, 0, {}, ["launch", "--platform", "sky", "--from-env"]),
        (
            "evaluate", 0, 0, {"RUN_DIR": RUN, "OPTIONS": "--json --step 3"},
            ["evaluate", "--from-env", "--json", "--step", "3"],
        ),
        (
            "evaluate", 0, 0, {"RUN_DIR": RUN, "TASKS": "arc_easy", "OPTIONS": "--limit 3"},
            ["--model", "hf", "--model_args", "pretrained=exported", "--tasks", "arc_easy", "--limit", "3"],
        ),
        (
            "generate", 0, 0, {"RUN_DIR": RUN, "PROMPT": "-- To be", "OPTIONS": "--tokens 3"},
            ["generate", RUN, "--prompt=-- To be", "--tokens", "3"],
        ),
        (
            "prepare", 0, 0, {"SOURCE": "s3://b/*.jsonl", "OPTIONS": "--tokens 10B --field *"},
            [
                "prepare", "s3://b/*.jsonl", "--out", "s3://b/c d", "--tokenizer", "data/gpt2", "--tokens", "10B",
                "--field", "*",
            ],
        ),
        ("nccl-test", 1, 8, {}, torchrun("nccl-test", 1, 8, "recipes/nccl_test.py")),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_run_section_starts(
    name: str, rank: int, gpus: int, changed: dict[str, object], words: list[str], tmp_path: Path
) -> None:
    code, output = started(name, tmp_path, rank, gpus, **changed)
    assert code == 75  # what it starts has ended with
    exported = [f"export {RUN} exported --overwrite"] if "TASKS" in changed else []
    run_dir = f"s3://b/{ID}" if name == "train-spot" else str(changed.get("RUN_DIR", ""))
    assert output.splitlines() == [*exported, *(f"<{word}>" for word in words), *shown(RUN_DIR=run_dir)]


@pytest.mark.parametrize("name", TEACHING)
def test_nothing_is_trained_on_machines_that_preflight_refuses(name: str, tmp_path: Path) -> None:
    code, output = started(name, tmp_path, PREFLIGHT_ENDS_WITH=64)
    assert (code, output) == (64, "preflight --from-env --master-port=29500\n")


@pytest.mark.parametrize("name", ["evaluate", "generate"])
def test_by_default_the_run_of_train_yaml_is_read(name: str) -> None:
    assert envs(name)["RUN_DIR"] == configured(DEFAULT).run.dir
