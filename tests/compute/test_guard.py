"""Which steps the guard refuses, and which batches a plan leaves out."""

import math
from statistics import fmean, stdev

import pytest
import torch

from mingpt.compute.guard import Guard
from mingpt.config.schema import Health

CPU = torch.device("cpu")
QUIET = [2.0 + 0.01 * (i % 3) for i in range(8)]


def refused(guard: Guard, *losses: float, norm: float = 1.0) -> list[bool]:
    return [bool(guard.refuses(torch.tensor(x, dtype=torch.float64), torch.tensor(norm))) for x in losses]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_or_a_norm_that_is_not_finite_is_refused_and_counted(bad: float) -> None:
    """After the last skip that is allowed nothing is taken any more: who hears of it later finds the same first one."""
    guard = Guard(Health(max_skips=3), CPU)
    assert refused(guard, 1.0, bad, bad) == [False, True, True]
    assert refused(guard, 1.0) == [False]
    assert refused(guard, 1.0, norm=bad) == [True]
    assert refused(guard, bad, bad, 1.0, 1.0) == [True] * 4
    assert int(guard.skips) == 5


def test_a_spike_is_what_lies_too_far_above_the_last_good_losses() -> None:
    limit = fmean(QUIET) + 4 * stdev(QUIET)
    guard = Guard(Health(spike_sigma=4, spike_window=8), CPU)
    assert refused(guard, *QUIET[:-1], 9.0) == [False] * 8  # nothing is a spike before the window is full
    guard = Guard(guard.config, CPU)
    assert refused(guard, *QUIET) == [False] * 8
    assert refused(guard, limit + 1e-9, math.nan, limit + 1) == [True, True, True]  # none of them enters the window
    assert refused(guard, limit - 1e-9) == [False]
    # That one has taken the place of the first.
    later = [*QUIET[1:], limit - 1e-9]
    assert refused(guard, fmean(later) + 4 * stdev(later) + 1e-9) == [True]
    assert refused(guard, 0.0) == [False]  # below is no spike


def test_a_guard_goes_on_from_its_state_as_if_it_had_not_been_stopped() -> None:
    health = Health(spike_sigma=4, spike_window=8, max_rollbacks=1)
    losses = [*QUIET, 3.0, 2.0, math.nan, 2.02, 2.1, 9.0, 2.0]
    whole, expected = Guard(health, CPU), []
    for loss in losses:
        expected += refused(whole, loss)
    for cut in range(len(losses)):
        first, second = Guard(health, CPU), Guard(health, CPU)
        found = refused(first, *losses[:cut])
        second.load(first.state())
        assert found + refused(second, *losses[cut:]) == expected
        assert {k: v.tolist() for k, v in second.state().items()} == {k: v.tolist() for k, v in whole.state().items()}


def test_what_was_left_out_stays_so_when_the_settings_are_set_back() -> None:
    before, after = Guard(Health(max_rollbacks=2), CPU), Guard(Health(), CPU)
    before.dropped = ((9, 10), (3, 5), (1, 4), (5, 6))
    after.load(before.state())
    assert after.dropped == ((1, 6), (9, 10))
    assert after.state().keys() == before.state().keys()
