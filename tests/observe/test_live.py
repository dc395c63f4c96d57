"""The live display of a terminal, and what a machine could do."""

import io
import math
import os
import pty
import re
import subprocess
import sys
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
from run_kit import TINY
from told import Told

DONE = StepDone(
    200, 3.0, 1.0, tokens_per_second=8192.0, tokens_seen=819_200, seconds_left=400.0, peak_memory=2**31, mfu=0.25
)


def shown(live: LiveLine, width: int) -> str:
    """What a terminal of this width shows."""
    live.console.width = width
    with live.console.capture() as screen:
        live.console.print(live.draw())
    return screen.get()


def test_what_counts_most_is_seen_in_a_narrow_window_too(told: Told) -> None:
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
    assert [len(text.splitlines()) for text in texts] == [2] * 6
    told("".join(texts))


LONG = StepDone(
    98_765, 10.1234, 123.45, lr=6e-4, tokens_per_second=1_234_567.0, tokens_seen=51_200_000_000, seconds_left=85_000.0,
    peak_memory=70 * 2**30, mfu=0.456,
)  # fmt: skip


def test_a_line_of_a_long_run_has_whole_fields_in_the_order_in_which_they_count(told: Told) -> None:
    """At the usual widths of a window, and in a log, whose lines have less than 100 columns."""
    live = LiveLine(Console(file=io.StringIO()))
    for event in (
        AttemptStarted(12, 0, 600_000, 64, "NVIDIA H100 80GB HBM3", "n1"),
        LONG,
        Evaluated(98_000, 3.25, 3.125),
    ):
        live.on(event)
    live.live.stop()
    lines = [line for width in (80, 100, 120) for line in shown(live, width).splitlines()]
    lines += [step_line(replace(LONG, grad_norm=norm), 600_000) for norm in (1.0, math.nan)]
    assert max(map(len, lines[-2:])) < 100
    told(lines)


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
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for processes, share in ((None, 1.0), ("1", 1.0), ("2", 1.0), ("3", 2 / 3), ("4", 0.5)):  # two GPUs among these
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes) if processes else None
        assert peak_flops(torch.device("cuda"), precision) == (peak and peak * share)
    assert peak_flops(torch.device("cpu"), precision) is None


def test_a_gpu_that_slurm_gives_to_one_task_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """--gpus-per-task=1, four tasks on a node of four GPUs: each sees one, and its MFU was four times too high."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    environment = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_GPUS_ON_NODE": "4"}
    for name, value in {**environment, "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert peak_flops(torch.device("cuda"), "bf16") == 121e12


@pytest.mark.slow
def test_on_a_terminal_a_run_is_one_live_display(text: Path, tmp_path: Path) -> None:
    arguments = [*TINY, f"data.path={text}", f"data.cache_dir={tmp_path}/cache", f"run.dir={tmp_path}/run"]
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "160"}
    command = [sys.executable, "-m", "mingpt.train", *arguments]
    said = b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as child:
        os.close(theirs)
        try:
            while more := os.read(ours, 65536):
                said += more
        except OSError:  # Linux: the other side is closed
            pass
        assert child.wait(200) == 0, said.decode()
    os.close(ours)
    shown = said.decode()
    assert not re.search("step 24/24  loss .*  lr", shown)
    assert re.search(r"step 24/24  loss [0-9.]+  .*  0 s left  [0-9,]+ tokens/s", shown)
    assert shown.rstrip().splitlines()[-1].startswith("goodput ")
