"""The live display of a terminal, and what a machine could do."""

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mingpt.observe.events import (
    AttemptEnded,
    AttemptStarted,
    Evaluated,
    Evaluating,
    HotCommitted,
    SnapshotCommitted,
    SnapshotLost,
    StepDone,
)
from mingpt.observe.live import LiveLine
from mingpt.observe.speed import flops_per_token, peak_flops
from run_kit import TINY

STARTED = AttemptStarted(3, 100, 1000, 8, "NVIDIA L4", "n1")
DONE = StepDone(
    200,
    3.0,
    1.0,
    tokens_per_second=8192.0,
    tokens_seen=819_200,
    seconds_left=400.0,
    peak_memory=2**31,
    mfu=0.25,
)
FULL = (
    "━━━━────────────────  step 200/1000  loss 3.5000 ↓  val 3.2500 (best 3.0000)  8,192 tokens/s  25% MFU  "
    "6 min 40 s left",
    "attempt 3  8 x NVIDIA L4  snapshot 150 (in memory 190)  2 SNAPSHOTS LOST  2.0 GiB  819,200 tokens  "
    "cost 1.50, 5.50 at the end",
)


@pytest.fixture
def live() -> Iterator[LiveLine]:
    now = [0.0]
    live = LiveLine(Console(file=io.StringIO(), width=160), price=36.0, spent=1.0, now=lambda: now[0])
    live.on(STARTED)
    live.fast.add(3.5)
    live.slow.add(4.0)
    now[0] = 50.0
    yield live
    live.on(AttemptEnded(200, False, None))


def shown(live: LiveLine, width: int = 160) -> list[str]:
    """What a terminal of this width shows: nothing is cut and nothing begins a line of its own."""
    console = Console(file=io.StringIO(), width=width)
    live.console.width = width
    console.print(live.draw())
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_of_which_little_is_known_little_is_shown(live: LiveLine) -> None:
    assert shown(live)[1] == "attempt 3  8 x NVIDIA L4  no snapshot yet  cost 1.50, 1.50 at the end"
    live.on(StepDone(101, float("nan"), 1.0, seconds_left=60.0))
    assert "MFU" not in shown(live)[0]
    assert "loss 3.5000" in shown(live)[0]


@pytest.mark.parametrize(
    ("width", "first", "second"),
    [
        (120, FULL[0], None),
        (100, "step 200/1000  loss 3.5000 ↓  val 3.2500 (best 3.0000)  8,192 tokens/s  25% MFU  6 min 40 s left", None),
        (85, "step 200/1000  loss 3.5000 ↓  val 3.2500  8,192 tokens/s  25% MFU  6 min 40 s left", None),
        (80, "step 200/1000  loss 3.5000  val 3.2500  8,192 tokens/s  6 min 40 s left", None),
        (
            60,
            "step 200/1000  loss 3.5000  val 3.2500  8,192 tokens/s",
            "attempt 3  snapshot 150 (in memory 190)  2 SNAPSHOTS LOST",
        ),
        (20, "step 200/1000", "2 SNAPSHOTS LOST"),
    ],
)
def test_at_any_width_a_field_is_whole_or_absent(live: LiveLine, width: int, first: str, second: str | None) -> None:
    """The least important ones are absent first."""
    for event in (DONE, Evaluated(200, 3.25, 3.0), SnapshotCommitted(150, "d", 1.0), HotCommitted(190)):
        live.on(event)
    live.on(SnapshotLost(200, 2, "no"))
    live.fast.value, live.slow.value = 3.5, 4.0
    assert shown(live, 160) == [*FULL]
    lines = shown(live, width)
    assert lines[0] == first
    assert second is None or lines[1] == second
    parts = {part for line in FULL for part in re.split(r"  | (?=[↓(])", line)}
    assert {part for line in lines for part in re.split(r"  | (?=[↓(])", line)} <= parts
    assert all(len(line) < width for line in lines)


def test_an_evaluation_shows_how_far_it_is(live: LiveLine) -> None:
    live.on(DONE)
    live.on(Evaluating(200, 0.125, 3.0))
    assert "step 200/1000  evaluating 12%" in shown(live, 60)[0]
    live.on(Evaluated(200, 3.25, 3.0))
    assert "evaluating" not in shown(live)[0]


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
    assert peak_flops(torch.device("cpu"), precision) is None


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
            assert not re.search("step 20/20  loss .*  lr", said)
            assert re.search(r"━  step 20/20  loss [0-9.]+ .  .* tokens/s  0 s left", said)
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
