"""What SkyPilot's own AWS code would rent for each recipe: --dryrun, moto for AWS, in a network without a way out."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from paths_kit import ROOT

SKY = ROOT / ".venv-sky"
LAUNCH = "launch --dryrun -y recipes/"
SPOT = f"{LAUNCH}train-spot.yaml --env RUN_DIR=s3://bucket/runs"
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
COMMANDS = {
    **{f"{name} {gpus}": f"{LAUNCH}{name}.yaml --gpus {gpus} --num-nodes 1 --env RUN_DIR=s3://bucket/runs"
       for name in ("train", "train-rdzv", "train-spot", "evaluate", "generate") for gpus in GPUS},
    **{f"serve {gpus}": f"{LAUNCH}serve.yaml --gpus {gpus} --env RUN_DIR=s3://bucket/run --secret VLLM_API_KEY=key"
       for gpus in GPUS},
    "train": f"{LAUNCH}train.yaml",
    "train without GPUs": f"{LAUNCH}train.yaml --gpus none",
    "train on four": f"{LAUNCH}train.yaml --num-nodes 4 --gpus L4:4 --cpus 8+",
    "train-rdzv on four": f"{LAUNCH}train-rdzv.yaml --num-nodes 4 --gpus L4:4 --cpus 8+",
    "spot": SPOT,
    "spot of one kind": f"{SPOT} --num-nodes 4 --gpus L4:4 --cpus 8+",
    "spot without a bucket": f"{LAUNCH}train-spot.yaml",
    "evaluate": f"{LAUNCH}evaluate.yaml",
    "generate": f"{LAUNCH}generate.yaml",
    "serve": f"{LAUNCH}serve.yaml --env RUN_DIR=s3://bucket/run --secret VLLM_API_KEY=key",
    "serve without a key": f"{LAUNCH}serve.yaml --env RUN_DIR=s3://bucket/run",
}  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture
def answer(tmp_path: Path) -> Callable[[str], str]:
    """What SkyPilot says to one of COMMANDS, its exit code last."""
    if not SKY.exists():
        pytest.skip("needs SkyPilot in .venv-sky: make .venv-sky/.installed")
    if subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link"], capture_output=True).returncode:
        pytest.skip("needs root and iproute2: a network of its own")
    commands = "".join(f"{command}\n" for command in COMMANDS.values())
    script = [str(ROOT / "tests/lab/aws/dryrun.sh"), str(SKY), str(tmp_path)]
    done = subprocess.run(script, input=commands, cwd=ROOT, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr
    told = {name: (tmp_path / f"{number}.txt").read_text() for number, name in enumerate(COMMANDS)}
    return lambda name: re.sub(r"\x1b\[\d*m", "", told[name])


def chosen(told: str) -> list[str]:
    """The instance, vCPUs, memory, GPUs and price an hour that SkyPilot has decided for."""
    assert told.endswith("Dryrun finished.\n\nexit code 0\n"), told
    (line,) = [line for line in told.splitlines() if "✔" in line]
    return line.split()[2:-1]


def test_what_aws_would_be_asked_for(answer: Callable[[str], str]) -> None:
    """One test for all commands: they share a server, which takes longer to start than they do."""
    for name, nodes, what in (
        ("train", "1 node", ["g6.xlarge", "4", "16", "L4:1", "0.80"]),
        ("train on four", "4 nodes", ["g6.12xlarge", "48", "192", "L4:4", "18.41"]),
        ("train-rdzv on four", "4 nodes", ["g6.12xlarge", "48", "192", "L4:4", "18.41"]),
        ("spot", "2 nodes", ["g6.xlarge[Spot]", "4", "16", "L4:1", "0.66"]),
        ("spot of one kind", "4 nodes", ["g6.12xlarge[Spot]", "48", "192", "L4:4", "7.60"]),
        ("evaluate", "1 node", ["g6.xlarge", "4", "16", "L4:1", "0.80"]),
        ("generate", "1 node", ["m6i.xlarge", "4", "16", "-", "0.19"]),
        ("serve", "1 node", ["g6.xlarge", "4", "16", "L4:1", "0.80"]),
    ):
        assert f"Considered resources ({nodes}):" in answer(name)
        assert chosen(answer(name)) == what
    assert "-" in chosen(answer("train without GPUs"))
    for name in ("train", "train-rdzv", "train-spot", "evaluate", "generate", "serve"):
        for gpus, (machine, price) in GPUS.items():
            (rented, *_, kind, cost) = chosen(answer(f"{name} {gpus}"))
            assert (rented.removesuffix("[Spot]"), kind) == (machine, gpus)
            assert name == "train-spot" or cost == price
    # A spot job may have any of several kinds, by price.
    kinds = re.findall(r"\S+\[Spot\] +\d+ +\d+ +(\S+)", answer("spot"))
    assert kinds == ["L4:1", "A10G:1", "L4:4", "A10G:4"]
    assert "Environment variable 'RUN_DIR' is None. Please set a value for it" in answer("spot without a bucket")
    assert "No value available for secret(s): VLLM_API_KEY" in answer("serve without a key")
