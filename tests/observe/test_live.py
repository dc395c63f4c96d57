"""The live display of a terminal, and what a machine could do."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mingpt.observe.events import (
    AttemptEnded,
    AttemptStarted,
    Evaluated,
    HotCommitted,
    SnapshotCommitted,
    SnapshotLost,
    StepComputed,
    TasksEvaluated,
)
from mingpt.observe.live import LiveLine
from mingpt.observe.speed import flops_per_token, peak_flops
from run_kit import TINY

STARTED = AttemptStarted(3, 100, 1000, 8, "NVIDIA L4", "n1", 1000, 4096)


def shown(live: LiveLine) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(live.draw())
    file = console.file
    assert isinstance(file, io.StringIO)
    return re.sub(r"^.*?(?=step )", "", re.sub(r"[0-9.]+ GiB", "2.0 GiB", file.getvalue())).rstrip()


def test_it_shows_where_a_run_is_how_fast_and_what_is_safe() -> None:
    now = [0.0]
    live = LiveLine(Console(file=io.StringIO()), flops=10**6, peak=32.768e9, price=36.0, spent=1.0, now=lambda: now[0])
    live.on(STARTED)
    for step in range(101, 201):
        now[0] += 0.5
        live.on(StepComputed(step, 4.0 if step < 150 else 3.0, 1.0, (), ()))
    live.on(Evaluated(200, 3.25, 3.0))
    live.on(SnapshotCommitted(150, "d", 1.0))
    live.on(HotCommitted(190))
    assert [line.rstrip() for line in shown(live).splitlines()] == [
        "step 200/1000  loss 3.0046 ↓  val 3.2500 (best 3.0000)  8,192 tokens/s  25% MFU  6 min 40 s left",
        "attempt 3  8 x NVIDIA L4  2.0 GiB  durable 150, hot 190  cost 1.50, 5.50 at the end",
    ]
    live.on(SnapshotLost(200, 2, "no"))
    assert "durable 150, hot 190  2 SNAPSHOTS LOST" in shown(live)
    live.on(AttemptEnded(200, False, None))


def test_a_run_of_which_little_is_known_shows_that() -> None:
    live = LiveLine(Console(file=io.StringIO()), now=lambda: 0.0)
    live.on(STARTED)
    live.on(StepComputed(101, float("nan"), 1.0, (), ()))
    assert shown(live).splitlines()[1].strip() == "attempt 3  8 x NVIDIA L4  2.0 GiB  durable none yet"
    live.on(AttemptEnded(101, False, None))


def test_time_of_an_evaluation_is_no_time_of_a_step() -> None:
    now = [0.0]
    live = LiveLine(Console(file=io.StringIO()), now=lambda: now[0])
    live.on(STARTED)
    for step in range(101, 110):
        now[0] += 0.5
        live.on(StepComputed(step, 4.0, 1.0, (), ()))
        for event in (Evaluated(step, 3.25, 3.0), TasksEvaluated(step, {"arc_easy/acc": 0.75})):
            now[0] += 100
            live.on(event)
    assert live.seconds.value == 0.5
    live.on(AttemptEnded(110, False, None))


def test_a_token_costs_what_the_paper_says() -> None:
    """PaLM, appendix B; 124M at 1,024 tokens: about 855 million."""
    assert flops_per_token(124_439_808, 12, 768, 1024) == 6 * 124_439_808 + 12 * 12 * 768 * 1024


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA H100 NVL", "bf16", None),
        ("Quadro T400", "bf16", None),
    ],
)
def test_a_gpu_is_known_by_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda"), precision) == peak


def test_a_cpu_is_measured_and_no_random_number_is_taken() -> None:
    before = torch.get_rng_state()
    measured = peak_flops(torch.device("cpu"), "fp32")
    assert measured
    assert measured > 1e8
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_on_a_terminal_a_run_is_one_live_display(text: Path, tmp_path: Path) -> None:
    """In a log it is lines; the weights are the same."""
    digests = list[str]()
    for place in ("log", "terminal"):
        arguments = [*TINY, f"data.path={text}", f"data.cache_dir={tmp_path}/cache", f"run.dir={tmp_path}/{place}"]
        command = [sys.executable, "-m", "mingpt.train", *arguments, "train.max_steps=20", "schedule.decay_steps=20"]
        if place == "log":
            said = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
            assert "step 20/20  loss" in said
        else:
            said = on_a_terminal(command)
            assert "step 20/20  loss" not in re.sub("━.*", "", said)
            assert re.search(r"━.* step 20/20  loss [0-9.]+ . .*of matmul", said)
            assert said.rstrip().splitlines()[-1].startswith("goodput ")
        digests += re.findall(r"finished: step 20, digest ([0-9a-f]{64})", said)
    assert len(digests) == 2
    assert len(set(digests)) == 1


def on_a_terminal(command: list[str]) -> str:
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "160"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as child:
        os.close(theirs)
        said = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:  # Linux: the other side is closed
                break
            if not more:
                break
            said += more
        assert child.wait(200) == 0, said.decode()
    os.close(ours)
    return said.decode()
