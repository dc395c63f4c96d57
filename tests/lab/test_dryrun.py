"""What SkyPilot's own AWS code would rent for each recipe: --dryrun, moto for AWS, in a network without a way out."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.kits.paths_kit import ROOT, ran

SKY = ROOT / ".venv-sky"
TRAIN, SPOT = "train.yaml", "train-spot.yaml --env RUN_DIR=s3://bucket/runs"
SERVE = "serve.yaml --env RUN_DIR=s3://bucket/run"
KEY = "--secret VLLM_API_KEY=key"
PREPARE = "prepare.yaml --env OUT=s3://bucket/tokens"
CPUS = "--gpus none --cpus 4+ --memory 8+"
# The flags of docs/skypilot.md, in place of a recipe's copy.
MORE = "--num-nodes 8 --gpus H100:8 --network-tier best --disk-size 512 --disk-tier best --retry-until-up"
FOUR = "--num-nodes 4 --gpus L4:4 --cpus 8+"
# Of each command the nodes, and of each node the machine, vCPUs, memory, GPUs and price an hour.
RENTED = {
    TRAIN: "1 node: g6.xlarge 4 16 L4:1 0.80",
    f"{TRAIN} {FOUR}": "4 nodes: g6.12xlarge 48 192 L4:4 18.41",
    "train-rdzv.yaml": "2 nodes: g6.xlarge 4 16 L4:1 1.61",
    f"train-rdzv.yaml {FOUR}": "4 nodes: g6.12xlarge 48 192 L4:4 18.41",
    SPOT: "2 nodes: g6.xlarge[Spot] 4 16 L4:1 0.66",
    f"{SPOT} {FOUR}": "4 nodes: g6.12xlarge[Spot] 48 192 L4:4 7.60",
    "evaluate.yaml": "1 node: g6.xlarge 4 16 L4:1 0.80",
    "generate.yaml": "1 node: m6i.xlarge 4 16 - 0.19",
    f"{SERVE} {KEY}": "1 node: g6.xlarge 4 16 L4:1 0.80",
    PREPARE: "1 node: m6i.2xlarge 8 32 - 0.38",
    "nccl-test.yaml": "2 nodes: g6.xlarge 4 16 L4:1 1.61",
    f"{TRAIN} {CPUS}": "1 node: m6i.xlarge 4 16 - 0.19",
    f"{TRAIN} -c train4 --num-nodes 3 --gpus L4:4 --resize": "3 nodes: g6.12xlarge 48 192 L4:4 13.80",
    f"{TRAIN} {MORE}": "8 nodes: p5.48xlarge 192 2048 H100:8 440.32",
}
REFUSED = {
    TRAIN.replace("train", "train-spot"): "Environment variable 'RUN_DIR' is None. Please set a value for it",
    SERVE: "No value available for secret(s): VLLM_API_KEY",
    "prepare.yaml": "Environment variable 'OUT' is None. Please set a value for it",
}
# The prices of docs/skypilot.md.
GPUS = {
    "L4:1": ("g6.xlarge", "0.80"),
    "L4:8": ("g6.48xlarge", "13.35"),
    "A10G:8": ("g5.48xlarge", "16.29"),
    "A100:8": ("p4d.24xlarge", "21.96"),
    "A100-80GB:8": ("p4de.24xlarge", "27.45"),
    "H100:8": ("p5.48xlarge", "55.04"),
    "H200:8": ("p5en.48xlarge", "63.30"),
    "B200:8": ("p6-b200.48xlarge", "113.93"),
}
EACH = (TRAIN, "train-rdzv.yaml", "evaluate.yaml", "generate.yaml", f"{SERVE} {KEY}", SPOT, "nccl-test.yaml")


def chosen(told: str) -> list[str]:
    """The machine that SkyPilot has decided for."""
    assert told.endswith("Dryrun finished.\n\nexit code 0\n"), told
    (line,) = [line for line in told.splitlines() if "✔" in line]
    return line.split()[2:-1]


@pytest.mark.slow
@pytest.mark.nightly
def test_what_aws_would_be_asked_for(tmp_path: Path) -> None:
    """One test for all commands: they share a server, which takes longer to start than they do."""
    if not SKY.exists():
        pytest.skip("needs SkyPilot in .venv-sky: make .venv-sky/.installed")
    if subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link"], capture_output=True).returncode:
        pytest.skip("needs root and iproute2: a network of its own")
    kinds = {(recipe, gpus): f"{recipe} --num-nodes 1 --gpus {gpus}" for recipe in EACH for gpus in GPUS}
    commands = [*RENTED, *REFUSED, *kinds.values()]
    given = "".join(f"launch --dryrun -y recipes/{command}\n" for command in commands)
    done = ran([ROOT / "tests/lab/aws/dryrun.sh", SKY, tmp_path], input=given, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    files = (tmp_path / f"{number}.txt" for number in range(len(commands)))
    told = {command: re.sub(r"\x1b\[\d*m", "", file.read_text()) for command, file in zip(commands, files, strict=True)}
    for command, what in RENTED.items():
        (nodes,) = re.findall(r"Considered resources \((.*)\):", told[command])
        assert f"{nodes}: {' '.join(chosen(told[command]))}" == what
    for (recipe, gpus), command in kinds.items():
        (machine, *_, kind, cost) = chosen(told[command])
        assert (machine.removesuffix("[Spot]"), kind) == (GPUS[gpus][0], gpus)
        assert recipe == SPOT or cost == GPUS[gpus][1]
    # A spot job may have any of several kinds, by price.
    assert re.findall(r"\S+\[Spot\] +\d+ +\d+ +(\S+)", told[SPOT]) == ["L4:1", "A10G:1"]
    for command, why in REFUSED.items():
        assert why in told[command]
