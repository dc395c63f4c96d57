"""mingpt selftest: a machine that computes otherwise is seen, and a good one passes."""

import json
import os
import signal
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mingpt.preflight import computing
from mingpt.selftest import bits, command, syncs
from mingpt.selftest.command import judge
from mingpt.selftest.known import compare, row
from mingpt.selftest.runs import Runs, Started
from mingpt.train import loop
from node_kit import Node, wait_until
from paths_kit import CRASH_SITE

CPU = torch.device("cpu")


def test_a_result_that_changes_between_repetitions_is_seen() -> None:
    digests = cycle(["a", "a", "b"])
    works = {"good": lambda: lambda: "g", "sick": lambda: lambda: next(digests)}
    found = bits.repeat(works, CPU, 0.0)
    assert found == {"digests": {"good": {"g": 3}, "sick": {"a": 2, "b": 1}}, "absent": {}}


def test_a_kernel_that_is_not_here_is_named_and_the_others_are_tried() -> None:
    def absent() -> bits.Case:
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    found = bits.repeat({"cudnn": absent, "math": lambda: lambda: "m"}, CPU, 0.0)
    assert found == {"digests": {"math": {"m": 3}}, "absent": {"cudnn": "No available kernel. Aborting execution."}}


def test_a_process_that_differs_from_the_others_is_named() -> None:
    good: dict[str, Any] = {"digests": {"gpt2": {"a": 4}}, "absent": {"x": "why"}}
    assert [str(r) for r in judge([good, good])] == ["ok    gpt2: a, 8 times", "      x: not here: why"]
    sick = {"digests": {"gpt2": {"a": 3, "b": 1}}, "absent": {}}
    line = "FAIL  gpt2: 2 different results: process 0: a 4 times; process 1: a 3 times, b 1 times"
    assert str(next(judge([good, sick]))) == line


def test_a_known_kind_of_machine_has_known_digests(tmp_path: Path) -> None:
    kind = {"device": "H200", "torch": "2.13.0", "probe": "not compared", "peak": {}}
    table = tmp_path / "known.json"
    table.write_text(json.dumps([row(kind, {"a": "1", "b": "2"}, "run")]))
    assert compare(row(kind, {"a": "1", "new": "3"}, "run"), table).ok is True
    other = compare(row(kind, {"a": "1", "b": "9"}, "other"), table)
    assert (other.ok, other.found) == (False, "others than a known machine of this kind: b, the undisturbed run")
    assert compare(row({**kind, "torch": "2.14.0"}, {"a": "9"}, "x"), table).ok is None


@pytest.mark.parametrize("precision", bits.PRECISIONS)
def test_a_step_has_the_same_bits_every_time_and_each_number_counts(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = bits.step_case("modern", precision, bits.KERNELS["cpu"][0], False, CPU)
    first = case()
    assert case() == first
    digest = bits.digest

    def flipped(tensors: list[torch.Tensor]) -> str:
        last = tensors[-1].detach().clone()
        last.view(torch.int32).flatten()[-1] ^= 1
        return digest([*tensors[:-1], last])

    monkeypatch.setattr(bits, "digest", flipped)
    assert case() != first


def test_all_cases_of_this_machine_differ_from_each_other() -> None:
    found = bits.repeat(bits.cases(CPU, compiled=False), CPU, 0.0)["digests"]
    assert len(found) == 13
    assert all(len(counts) == 1 for counts in found.values()), found
    assert len({next(iter(counts)) for counts in found.values()}) == 13


def test_the_quick_form_answers_with_json_and_a_row(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mingpt.selftest", "--quick", "--seconds", "0", "--json", "--device", "cpu"]
    ended = subprocess.run([*command, "--out", tmp_path / "row.json"], capture_output=True, text=True, timeout=600)
    found = json.loads(ended.stdout)
    # This machine may differ from a known one of its kind; all else is a fault of ours.
    assert [r["what"] for r in found["results"] if r["ok"] is False] in ([], ["known machines"])
    assert ended.returncode == (0 if found["ok"] else 1)
    assert json.loads((tmp_path / "row.json").read_text()) == found["row"]
    assert found["row"]["digests"].keys() == bits.cases(CPU, compiled=False).keys()


def test_a_gpu_that_is_not_there_is_a_users_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "-m", "mingpt.selftest", "--device", "cuda"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 64
    assert ended.stderr == "error: --device cuda: torch finds no GPU here; nvidia-smi shows whether the driver does\n"


def test_steps_are_watched_for_what_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def step(run: object, number: int) -> str:
        calls.append(number)
        if number == 6:
            raise RuntimeError("called a synchronizing CUDA operation")
        return "stats"

    monkeypatch.setattr(loop, "train_step", step)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", calls.append)
    syncs.watch()
    run: Any = SimpleNamespace(last_step=9)
    loop.train_step(run, 4)
    loop.train_step(run, 5)
    with pytest.raises(RuntimeError, match="synchronizing"):
        loop.train_step(run, 6)
    assert calls == [4, "error", 5, "default", "error", 6, "default"]


def test_preflight_names_a_node_that_computes_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [{"what": "gpt2", "ok": False, "found": "2 different results"}, {"what": "x", "ok": None, "found": ""}]

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:] == ["-m", "mingpt.selftest", "--quick", "--seconds", "10", "--json"]
        return subprocess.CompletedProcess(command, 1, stdout=json.dumps({"results": results}), stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    [found] = computing.findings()
    assert (found.level, found.text) == ("problem", "gpt2: 2 different results")
    monkeypatch.setattr(subprocess, "run", lambda c, **_: subprocess.CompletedProcess(c, 64, "", "error: no GPU\n"))
    assert [f.text for f in computing.findings()] == ["error: no GPU"]


def test_a_run_that_was_killed_has_ended() -> None:
    started = Started(["timeit", "-n1", "-r1", "-s", "import signal", "signal.pause()"])
    started.kill()
    assert started.process.returncode == -signal.SIGKILL


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path, "cpu", 2)


@pytest.mark.slow
def test_runs_that_are_killed_have_the_bits_of_the_undisturbed_one(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [same] = runs.undisturbed()
    assert (same.ok, same.found) == (True, f"1: {runs.digest[:16]}, 2: {runs.digest[:16]}")
    slow = tmp_path / "slow"  # the first snapshot's manifest is written seconds late
    slow.write_text("before manifest durable slow")
    monkeypatch.setenv("PYTHONPATH", str(CRASH_SITE))
    monkeypatch.setenv("CRASH_AT", str(slow))
    monkeypatch.setenv("CRASH_PART_BYTES", str(1 << 26))
    [killed] = runs.killed()
    assert (killed.ok, slow.exists()) == (True, False)
    # Runs that differ, and one that ends before the kill, are seen.
    monkeypatch.setattr(Started, "digest", lambda started: "x" * 16 + str(started.process.pid))
    [other] = runs.undisturbed()
    assert other.ok is False
    monkeypatch.setattr(Runs, "undisturbed", lambda _: iter(()))
    monkeypatch.setattr(Runs, "start", lambda *_, **__: Started(["mingpt.launch", "run.dir="]))
    results = list(runs.checks())
    assert [r.ok for r in results[1:4]] == [False, False, False]
    assert results[1].found.startswith("no line with")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_nothing_is_left_of_one_that_is_ended(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mingpt.selftest", "--seconds=0", "--device=cpu"]
    node = Node(command, {"TMPDIR": str(tmp_path)})
    wait_until(node.workers, "a run trains")
    os.kill(node.process.pid, number)
    assert node.wait() == 128 + number, node.output
    node.assert_nothing_left()
    assert list(tmp_path.glob("mingpt-selftest-*")) == []


def test_a_row_that_cannot_be_written_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, why in ((tmp_path, "Is a directory"), (tmp_path / "no/row", "there is no such file or bucket")):
        assert command.main(["--out", str(place)]) == 64  # at once: nothing was computed
        assert capsys.readouterr().err.startswith(f"error: --out={place}: {why}")
    monkeypatch.setattr(command, "check_all", lambda *_: ([], {"device": "cpu"}))
    assert command.main(["--out", f"{tmp_path}/row.json"]) == 0
    assert json.loads((tmp_path / "row.json").read_text()) == {"device": "cpu"}
