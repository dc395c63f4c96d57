"""Each process updates a slice of the state: the same bits and the same files as if one did it all."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paths_kit import ROOT
from run_kit import Run

KITS = ROOT / "tests" / "kits"


def run_world(size: int, folder: Path, each: int = 1) -> tuple[dict[str, Any], list[str]]:
    """What process 0 prints, and the files that all wrote. All print the same. each: processes of a node."""
    (folder / "snapshots").mkdir(parents=True)
    arguments = [str(size), str(each), str(folder / "rendezvous"), str(folder / "snapshots")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(KITS / "slices_worker.py"), str(rank), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(size)
    ]  # fmt: skip
    ends = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0] * size, ends
    found = [json.loads(out) for out, _ in ends]
    assert found == [found[0]] * size
    return found[0], sorted(path.name for path in (folder / "snapshots").iterdir())


@pytest.mark.slow
def test_worlds_of_one_to_five_give_the_same_bits_and_files(tmp_path: Path) -> None:
    """AdamW and Muon, clipped, with a skipped step, fp16's scale, a frozen layer, 16 bits; in slices or not."""
    worlds = {(size, 1): run_world(size, tmp_path / str(size)) for size in range(1, 6)}
    for size, each in ((4, 2), (6, 3)):  # nodes of several processes: two hops
        worlds[size, each] = run_world(size, tmp_path / f"{size} by {each}", each)
    alone, files = worlds[1, 1]
    assert alone["adamw"] == alone["unsharded"] != alone["fp16"]
    assert alone["muon"] == alone["muon unsharded"] != alone["adamw"]
    assert alone["bf16"] == alone["bf16 unsharded"] != alone["adamw"]
    assert alone["muon bf16"] == alone["muon bf16 unsharded"] != alone["muon"]
    assert len(files) == 10  # weights and optimizer state of five runs: what is not sharded has the same files
    assert {shape: found for shape, found in worlds.items() if found != (alone, files)} == {}


KILL = """
import os, signal
from pathlib import Path
from mingpt.compute.exchange import Gathering
plain, calls = Gathering.finish, []
def finish(self):
    calls.append(1)
    if self.world.rank == 1 and len(calls) == 7 and not Path(os.environ["KILLED"]).exists():
        Path(os.environ["KILLED"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    plain(self)
Gathering.finish = finish
"""


@pytest.mark.slow
def test_a_process_that_dies_between_update_and_gather_leaves_no_trace(
    tmp_path: Path, new_run: Callable[..., Run], undisturbed: Callable[..., Run]
) -> None:
    """The others then have weights of which a slice is old. None of that reaches a snapshot."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import sys\nif 'mingpt.train' in sys.orig_argv and 'torch.distributed.run' not in sys.orig_argv:\n"
        + "".join(f"    {line}\n" for line in KILL.splitlines())
    )
    run = new_run()
    run.env = {"PYTHONPATH": f"{hook}:{ROOT}", "KILLED": str(tmp_path / "killed")}
    output = run.finish(3, restarts=1)
    assert (tmp_path / "killed").exists()
    assert "resumed from step 4" in output
    assert run.digest() == undisturbed().digest()
