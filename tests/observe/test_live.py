"""The live display of a terminal, and what a machine could do."""

import io
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mingpt.observe.console import step_line
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
from mingpt.observe.speed import peak_flops
from tests.kits.run_kit import TINY

DONE = StepDone(
    200, 3.0, 1.0, tokens_per_second=8192.0, tokens_seen=819_200, seconds_left=400.0, peak_memory=2**31, mfu=0.25
)


def shown(live: LiveLine, width: int) -> str:
    """What a terminal of this width shows."""
    live.console.width = width
    with live.console.capture() as screen:
        live.console.print(live.draw())
    return screen.get()


def test_what_counts_most_is_seen_in_a_narrow_window_too() -> None:
    """Of which little is known little is shown; a line is never two."""
    live = LiveLine(Console(file=io.StringIO(), width=160))
    live.on(AttemptStarted(3, 100, 1000, 8, "NVIDIA L4", "n1"))
    texts = [shown(live, 160)]
    for event in (DONE, Evaluating(200, 0.125, 3.0)):
        live.on(event)
    texts.append(shown(live, 160))
    for more in (Evaluated(200, 3.25, 3.0), SnapshotCommitted(150, "d", 1.0), HotCommitted(190)):
        live.on(more)
    live.on(SnapshotLost(200, 2, "no"))
    texts += [shown(live, width) for width in (160, 80, 40)]
    live.on(Evaluated(200, 3.0, 3.0))
    texts.append(shown(live, 80))
    live.on(AttemptEnded(200, False, None))
    done, speed = "step 200/1000", "6 min 40 s left  8,192 tokens/s  25% MFU"
    machine, lost = "attempt 3  8 x NVIDIA L4", "2 SNAPSHOTS LOST  snapshot 150"
    seen = "2.0 GiB  819,200 tokens"
    assert [text.splitlines() for text in texts] == [
        ["step 100/1000", f"no snapshot yet  {machine}"],
        [f"{done}  evaluating 12%  loss 3.0000  {speed}", f"no snapshot yet  {machine}  {seen}"],
        [f"{done}  loss 3.0000  val 3.2500  {speed}  best val 3.0000", f"{lost}  (in memory 190)  {machine}  {seen}"],
        [f"{done}  loss 3.0000  val 3.2500  {speed}", f"{lost}  (in memory 190)  {machine}"],
        [f"{done}  loss 3.0000  val 3.2500", lost],
        [f"{done}  loss 3.0000  val 3.0000  {speed}", f"{lost}  (in memory 190)  {machine}"],
    ]


def test_a_line_of_a_log_has_whole_fields_in_less_than_100_columns_in_the_order_in_which_they_count() -> None:
    long = StepDone(98_765, 10.1234, 1.0, lr=6e-4, tokens_per_second=1_234_567.0, seconds_left=85_000.0, mfu=0.456)
    skipped = replace(long, grad_norm=math.nan)
    assert [step_line(replace(DONE, seconds_left=40.0), 1000), *(step_line(e, 600_000) for e in (long, skipped))] == [
        "step  200/1000  loss 3.0000  lr 0.00e+00  norm 1.00  40 s left  8,192 tokens/s  25.0% MFU  2.00 GiB",
        "step  98765/600000  loss 10.1234  lr 6.00e-04  norm 1.00  23 h 36 min left  1,234,567 tokens/s",
        "step  98765/600000  SKIPPED  loss 10.1234  lr 6.00e-04  norm nan  23 h 36 min left",
    ]


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA L40", "bf16", None),
    ],
)
def test_a_gpu_is_known_by_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, peak: float | None
) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for processes, share in ((None, 1.0), ("1", 1.0), ("2", 1.0), ("3", 2 / 3), ("4", 0.5)):  # two GPUs among these
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes) if processes else None
        assert peak_flops(cuda, precision) == (peak and peak * share)
    assert peak_flops(torch.device("cpu"), precision) is None
    # Slurm's --gpus-per-task=1, four tasks on a node of four GPUs: each sees one, which it does not share.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for variable in ("SLURM_JOB_ID=7", "SLURM_STEP_ID=0", "SLURM_PROCID=1", "SLURM_GPUS_ON_NODE=4"):
        monkeypatch.setenv(*variable.split("="))
    assert peak_flops(cuda, precision) == peak


@pytest.mark.slow
def test_on_a_terminal_a_run_is_one_live_display(
    text: Path, tmp_path: Path, in_terminal: Callable[..., tuple[int, str]]
) -> None:
    places = (f"data.path={text}", f"data.cache_dir={tmp_path}/cache", f"run.dir={tmp_path}/run")
    env = os.environ | {"TERM": "xterm", "COLUMNS": "160"}
    code, shown = in_terminal([sys.executable, "-m", "mingpt.train", *TINY, *places], env=env)
    assert code == 0, shown
    assert not re.search("step 24/24  loss .*  lr", shown)
    assert re.search(r"step 24/24  loss [0-9.]+  .*  0 s left  [0-9,]+ tokens/s", shown)
    assert shown.rstrip().splitlines()[-1].startswith("goodput ")
