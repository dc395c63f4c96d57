"""health.audit_every: a machine that computes wrongly is named before a weight is wrong, and nobody else ever is."""

import re
import socket
from pathlib import Path

import pytest
import torch

from config_kit import configured, problems
from mingpt.observe import sick
from mingpt.snapshot.attempts import records
from mingpt.train.audit import CHUNK, folded, gradient_hash, shift
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
    swapped = gradient.view(-1)[[*range(1, 35), 0]]
    assert gradient_hash(swapped).tolist() != healthy
    assert CHUNK % 4 == 0


def test_the_hash_of_all_knows_in_which_parameter_a_number_is() -> None:
    a, b = [1, 2, 3, 4], [5, 6, 7, 8]
    assert len({str(folded(table)) for table in ([a, b], [b, a], [a, a], [a, [5, 6, 7, 9]])}) == 4


def test_a_process_checks_one_of_another_node() -> None:
    assert shift(["a", "a", "b", "b"], 4) == 2
    assert shift(["a", "a", "b"], 3) == 2
    assert shift(["a"] * 4, 4) == 1  # one node: another process
    assert shift(["a", "b", "c"], 3) == 1
    assert shift(["a"], 1) == 0  # alone: its own microbatch again


def test_fast_has_no_single_gradients_to_compare() -> None:
    [problem] = problems(AUDIT, "reduce=fast")
    assert problem.startswith("health.audit_every ")
    configured(AUDIT)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = own(tmp_path_factory.mktemp("healthy"), "9 0 0 -")
    run.finish(1)
    return run.digest()


def own(folder: Path, how: str) -> OwnRun:
    run = own_run(folder / "run", "")
    run.code = ("model._target_=sick_kit.Sick", *run.code[1:])
    run.env = {**run.env, "SICK": how}
    return run


def test_alone_a_process_compares_with_itself_and_a_good_one_changes_no_bit(tmp_path: Path, healthy: str) -> None:
    run = own(tmp_path, "9 0 0 -")
    output = run.finish(1, "health.audit_every=1")
    assert "audit: every 1 steps, a process computes 7 microbatches in place of 6" in output
    assert run.digest() == healthy
    assert sick.read(run.dir) == []


# The first audit is in step 3, of the process's first microbatch. Backward was called by then: once before the first
# step, for all microbatches of two steps, and for the other process's microbatch. Then comes the call of the flip.
@pytest.mark.slow
@pytest.mark.parametrize(("world", "layer", "call"), [(2, 0, 9), pytest.param(4, 6, 7, marks=pytest.mark.nightly)])
def test_one_flip_is_found_named_and_computed_again(
    world: int, layer: int, call: int, tmp_path: Path, healthy: str
) -> None:
    run = own(tmp_path, f"1 {layer} {call} {tmp_path / 'flipped'}")
    output = run.finish(world, AUDIT, restarts=1)
    microbatch = 6 // world
    host = socket.gethostname()
    said = re.findall(r"audit of step 3: .*", output)[0]  # torchrun says it again
    assert f"process 1 (host {host}, cpu)" in said
    assert f"(of microbatch {microbatch}, first difference in layers.{layer}.weight)" in said
    assert len(records(run.dir)) == 2
    assert (sick.read(run.dir), run.digest()) == ([host], healthy)


@pytest.mark.slow
def test_a_process_that_is_always_wrong_is_outvoted_by_a_third(tmp_path: Path) -> None:
    run = own(tmp_path, f"1 0 0 {tmp_path / 'x'}")
    started = run.start(3, AUDIT)
    assert started.wait() != 0
    assert set(re.findall(r"audit of step 3: process (\d) ", started.output)) == {"1"}


@pytest.mark.slow
@pytest.mark.nightly
def test_two_can_not_tell_which_of_them_is_wrong(tmp_path: Path) -> None:
    run = own(tmp_path, f"1 0 0 {tmp_path / 'x'}")
    started = run.start(2, AUDIT)
    assert started.wait() != 0
    assert "cpu) or process 1 (host" in started.output
    assert sick.read(run.dir) == []
