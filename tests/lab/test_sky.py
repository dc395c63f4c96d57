"""`sky launch` of the recipes as they are, by real SkyPilot on real Slurm nodes."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab.lab_kit import (
    ROOT,
    SMALL,
    cut,
    digest,
    install_once,
    mend,
    needs_lab,
    on,
    shared,
    sky,
    undisturbed,
    wait_until,
)

# The time is for a busy machine, on which set-up alone takes long.
pytestmark = [pytest.mark.lab, pytest.mark.timeout(5400), needs_lab]

EXPERIMENT = "shakespeare_10m"  # the recipes' default


def env(**changed: object) -> list[str]:
    return [word for name, value in changed.items() for word in ("--env", f"{name}={value}")]


def training(run_dir: Path, *more: str) -> list[str]:
    return env(RUN_DIR=run_dir, OVERRIDES=" ".join((*SMALL, *more)))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("alone"), EXPERIMENT, SMALL)


@pytest.fixture
def cluster() -> Iterator[str]:
    """A cluster's name, which nobody has now or afterwards. Nothing is installed there before."""
    name = "new"
    sky("down", "-y", name, check=False)
    yield name
    sky("down", "-y", name)


def test_both_recipes_on_two_nodes_and_mistakes_that_end_a_job(alone: str, cluster: str) -> None:
    static, elastic = shared("static"), shared("rdzv")
    two = ("--num-nodes", "2", "--gpus", "L4:2")
    done = sky("launch", "-y", "-c", cluster, "recipes/train.yaml", *two, *training(static))
    assert "4 processes on cpu (gloo), 16 microbatches of 4 x 32 tokens" in done.stdout
    assert digest(static) == alone

    done = sky("exec", cluster, "recipes/train-rdzv.yaml", *two, *training(elastic))
    assert "4 processes on cpu (gloo)" in done.stdout
    assert digest(elastic) == alone

    # A mistake ends the job on all nodes, with its message in the job's log.
    done = sky("exec", cluster, "recipes/train.yaml", *two, *training(shared("key"), "trian.max_steps=3"), check=False)
    assert done.returncode != 0
    assert "trian" in sky("logs", cluster, "3", "--no-follow", check=False).stdout
    # So does a store that nobody answers for: nothing listens there. (launch and not exec: set-up brings its client.)
    bucket = env(RUN_DIR="s3://nobody/run", OVERRIDES=" ".join(SMALL), AWS_ENDPOINT_URL="http://10.99.0.1:9")
    keys = env(AWS_ACCESS_KEY_ID="lab", AWS_SECRET_ACCESS_KEY="hidden-in-every-log", AWS_DEFAULT_REGION="us-east-1")
    done = sky("launch", "-y", "-c", cluster, "recipes/train.yaml", *two, *bucket, *keys, check=False)
    assert done.returncode != 0
    said = sky("logs", cluster, "4", "--no-follow", check=False).stdout
    assert "s3://nobody/run" in said
    assert "hidden-in-every-log" not in said
    # The status of each of the cluster's jobs, by its number.
    found = dict(re.findall(r"^(\d+) .*\] +([A-Z_]+) ", sky("queue", cluster).stdout, re.M))
    assert found == {"1": "SUCCEEDED", "2": "SUCCEEDED", "3": "FAILED", "4": "FAILED"}


MANAGED = (*SMALL, "train.max_steps=200")


@pytest.fixture
def managed(tmp_path: Path) -> Path:
    """The lab has no spot machines; all else of the recipe is as it is."""
    install_once()
    recipe = tmp_path / "train-managed.yaml"
    text = (ROOT / "recipes/train-spot.yaml").read_text()
    text = text.replace("  any_of: [{use_spot: true}, {use_spot: false}]\n", "")
    recipe.write_text(re.sub(r"  accelerators: .*", "  accelerators: L4:2", text))
    return recipe


def start(name: str, recipe: Path, runs: Path, *overrides: str) -> None:
    words = env(RUN_DIR=runs, EXPERIMENT=EXPERIMENT, OVERRIDES=" ".join((*MANAGED, *overrides)))
    sky("jobs", "launch", "-y", "-d", "-n", name, str(recipe), "--workdir", str(ROOT), *words)


def ended(name: str) -> tuple[int, str]:
    """How often the job was recovered, and its last status."""
    found: list[tuple[str, str]] = []

    def over() -> bool:
        found[:] = re.findall(rf"{name} .* (\d+) +(SUCCEEDED|FAILED\w*) ", sky("jobs", "queue", "-a").stdout)
        return bool(found)

    wait_until(over, "the job's end", 1800)
    return int(found[0][0]), found[0][1]


def kill_the_launcher(node: int) -> None:
    on(f"n{node}", "pkill", "-KILL", "-f", "^[^ ]*python (-m|[^ ]*/world/start) mingpt[.]launch")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [cut, kill_the_launcher])
def test_a_managed_job_goes_on_after(fault: Callable[[int], None], managed: Path, tmp_path: Path) -> None:
    runs = shared("managed")
    name = f"managed-{runs.name[-6:]}"  # as no earlier job
    alone = undisturbed(tmp_path, EXPERIMENT, MANAGED)
    start(name, managed, runs, "world.timeout_seconds=60")
    try:
        wait_until(lambda: [*runs.glob("*/snapshots/step-*/manifest.json")], "a first snapshot", 1200)
        (nodes,) = set(on("login", "squeue", "-h", "-t", "R", "-o", "%N").split())
        last = int(on("login", "scontrol", "show", "hostnames", nodes).split()[-1].removeprefix("n"))
        fault(last)
        try:
            end = ended(name)
        finally:
            mend(last)
    finally:
        sky("jobs", "cancel", "-y", "-n", name, check=False)
    assert end == (1, "SUCCEEDED")
    (run_dir,) = runs.iterdir()  # one task id, one run
    assert digest(run_dir) == alone


@pytest.mark.slow
def test_a_managed_job_with_a_mistake_is_not_tried_again(managed: Path) -> None:
    runs = shared("mistake")
    name = f"mistake-{runs.name[-6:]}"
    start(name, managed, runs, "world.backend=nccl")  # set-up does not look for GPUs
    try:
        assert ended(name) == (0, "FAILED")
    finally:
        sky("jobs", "cancel", "-y", "-n", name, check=False)
