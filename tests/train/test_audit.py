"""health.audit_every: a machine that computes wrongly is named before a weight is wrong, and nobody else ever is."""

import re
import socket
from pathlib import Path

import pytest
import torch

from mingpt.observe import sick
from mingpt.train.attempt import attempt
from mingpt.train.audit import folded, gradient_hash, shift
from mingpt.world.lifetime import Lifetime
from own_kit import OwnRun, own_run

AUDIT = "health.audit_every=3"


def test_a_flip_of_any_bit_of_any_element_changes_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingpt.train.audit.CHUNK", 8)
    gradient = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    healthy = gradient_hash(gradient).tolist()
    assert gradient_hash(gradient.t().contiguous().t()).tolist() == healthy  # as its elements, wherever they lie
    seen = {str(healthy)}
    for bit in range(32 * gradient.numel()):
        sick = gradient.clone()
        sick.view(torch.int32).view(-1)[bit // 32] ^= -(2**31) if bit % 32 == 31 else 1 << bit % 32
        seen.add(str(gradient_hash(sick).tolist()))
    assert len(seen) == 1 + 32 * 35


def test_the_hash_of_all_knows_in_which_parameter_a_number_is() -> None:
    a, b = [1, 2, 3, 4], [5, 6, 7, 8]
    assert len({str(folded(table)) for table in ([a, b], [b, a], [a, a], [a, [5, 6, 7, 9]])}) == 4


def test_a_process_checks_one_of_another_node() -> None:
    assert shift(["a", "a", "b", "b"], 4) == 2
    assert shift(["a", "a", "b"], 3) == 2
    assert shift(["a"] * 4, 4) == 1  # one node: another process
    assert shift(["a", "b", "c"], 3) == 1
    assert shift(["a"], 1) == 0  # alone: its own microbatch again


def sick_run(folder: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> OwnRun:
    monkeypatch.setenv("SICK", how)
    run = own_run(folder, "")
    run.code, run.env = ("model._target_=sick_kit.Sick", *run.code[1:]), {}
    return run


def test_alone_a_process_compares_with_itself_and_a_good_one_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, audited = (sick_run(tmp_path / name, monkeypatch, "9 0 -") for name in ("plain", "audited"))
    for run, more in ((plain, []), (audited, ["health.audit_every=1"])):
        assert attempt(run.arguments(*more), Lifetime()) == 0
    assert "audit: every 1 steps, a process computes 7 microbatches in place of 6" in capsys.readouterr().out
    assert audited.digest() == plain.digest()
    assert sick.read(audited.dir) == []


@pytest.mark.slow
def test_one_flip_is_found_named_and_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first audit is in step 3, of the process's first microbatch. Backward was called by then: once before the
    # first step, for all microbatches of two steps, and for the other process's microbatch.
    run = sick_run(tmp_path / "run", monkeypatch, f"1 9 {tmp_path / 'flipped'}")
    with pytest.raises(AssertionError) as failed:
        run.finish(2, AUDIT)
    host = socket.gethostname()
    said = re.findall(r"audit of step 3: .*", str(failed.value))[0]
    assert f"process 1 (host {host}, cpu)" in said
    assert "(of microbatch 3, first difference in layers.0.weight)" in said
    run.finish(2, AUDIT)
    healthy = sick_run(tmp_path / "healthy", monkeypatch, "9 0 -")
    healthy.finish(1)
    assert (sick.read(run.dir), run.digest()) == ([host], healthy.digest())


@pytest.mark.slow
def test_a_process_that_is_always_wrong_is_outvoted_by_a_third(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError) as failed:
        sick_run(tmp_path / "run", monkeypatch, f"1 0 {tmp_path / 'x'}").finish(3, AUDIT)
    assert set(re.findall(r"audit of step 3: process (\d) ", str(failed.value))) == {"1"}
