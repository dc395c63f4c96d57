"""`mingpt train -m hydra/launcher=skypilot`, by a real SkyPilot: a run loses its node, and has a single run's bits."""

import re
import sys

import fsspec
import pytest

from mingpt.snapshot.store import Store
from tests.lab import lab_kit
from tests.lab.lab_kit import cut, digest, install_once, mend, needs_lab, on, s3, sky, undisturbed, wait_until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(5400), needs_lab]

SEEDS = (1, 2, 3)
SETTINGS = ("train.max_steps=200", "train.eval_every=100", "snapshot.every_steps=10", "snapshot.hot_every_steps=0")
GRID = ("experiment=synthetic", *SETTINGS, "seed=" + ",".join(map(str, SEEDS)))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("alone")
    return {n: undisturbed(folder / str(n), "synthetic", (*SETTINGS, f"seed={n}")) for n in SEEDS}


def test_managed_jobs_of_skypilot_and_one_loses_its_node(
    alone: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_once()
    folder, lost = "s3://sweeps/seeds", 0
    for name, value in {"ACCESS_KEY_ID": "lab", "SECRET_ACCESS_KEY": "hidden", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)

    def sweep(inside: str) -> str:
        machines = f"--infra slurm --gpus L4:4 --num-nodes 1 --no-use-spot --env AWS_ENDPOINT_URL={inside}"
        more = "--env NPROC_PER_NODE=1 --secret AWS_ACCESS_KEY_ID --secret AWS_SECRET_ACCESS_KEY"
        own = f"hydra.launcher.args='{machines} {more}'"
        words = ["hydra/launcher=skypilot", f"hydra.launcher.bucket={folder}", own]
        client = str(lab_kit.SCRIPTS / "client.sh")
        return lab_kit.run(client, sys.executable, "-m", "mingpt.train", "-m", *GRID, *words).stdout

    def steps(seed: int) -> list[int]:
        return Store(f"{folder}/seed-{seed}/snapshots").steps()

    with s3() as (here, inside):
        monkeypatch.setenv("AWS_ENDPOINT_URL", here)
        fsspec.filesystem("s3").mkdir("sweeps")
        try:
            assert re.findall(r"^seeds-seed-(\d): submitted$", sweep(inside), re.M) == ["1", "2", "3"]
            wait_until(lambda: steps(2), "a snapshot of the second", 600)
            (lost,) = (n for n in range(1, 7) if on(f"n{n}", "pgrep", "-f", "mingpt.*seed=2", check=False))
            cut(lost)
            going_on = sweep(inside)
            assert "seeds-seed-2: is going on" in going_on
            assert "submitted" not in going_on
            done = lambda: len(re.findall(r"seeds-seed-\d .* SUCCEEDED", sky("jobs", "queue", "-a").stdout))  # noqa: E731
            wait_until(lambda: done() == len(SEEDS), "all jobs have succeeded", 900)
            queue = sky("jobs", "queue", "-a").stdout
        finally:
            if lost:
                mend(lost)
            sky("jobs", "cancel", "-y", "-a", check=False)
        assert re.search(r"seeds-seed-2 .* 1 +SUCCEEDED", queue), queue  # recoveries
        told = sweep(inside)
        assert told.count(": has finished") == told.count(" finished ") == 3  # the table's states, too
        assert {n: digest(f"{folder}/seed-{n}") for n in SEEDS} == alone
