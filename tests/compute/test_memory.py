"""How many bytes of tensors a process has at a time, in buckets: in a step, and while a snapshot is put together."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from mingpt.commands.footprint import Living
from mingpt.compute.buckets import Sliced, make_buckets
from mingpt.compute.reduction import ExactReduction
from mingpt.compute.tree import shares
from mingpt.snapshot import staging
from mingpt.world.world import World
from tests.kits.config_kit import configured
from tests.kits.snapshot_kit import ALONE
from tests.kits.update_kit import on_meta, update_of

LAYERS, WIDTH, MICROBATCHES = 32, 64, 4
BUCKET = 8 * WIDTH * WIDTH * 4  # eight matrices: four buckets in all
WINDOW, PART = 1000, 40_000


def peaks(size: int, monkeypatch: pytest.MonkeyPatch, flights: int = 0) -> list[float]:
    """Of the weights and moments, of the backwards, after the sum, and of the update.

    flights: of one large bucket, on nodes of two.
    """
    if flights:
        monkeypatch.setattr("mingpt.compute.buckets.BUCKET_BYTES", 4 * BUCKET // flights)
    config, world = configured("model=gpt2", "data=random"), on_meta(monkeypatch, 0, size, 2 if flights else 1)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        buckets = make_buckets(model.named_parameters(), set(), world, True, 4 * BUCKET if flights else BUCKET)
    found, living = list[float](), Living(model)

    def peak() -> float:
        found.append(max(here for here, _ in living.points) / BUCKET)
        living.points.clear()
        return found[-1]

    with living:
        update = update_of(model, config.optimizer, config.schedule, world=world, buckets=buckets)
        reduction, share = ExactReduction(buckets, MICROBATCHES, world), shares(1, size, MICROBATCHES)[0]
        peak()
        for step in range(2):  # the second one begins with the sums of the first
            reduction.begin()
            for microbatch in share:
                reduction.expect(microbatch, microbatch == share[-1])
                for p in reversed([*model.parameters()]):
                    p.grad = torch.empty_like(p)
                    reduction._on_gradient(p)
            del p
            reduction.finish()
            peak()
            found.append(living.bytes / BUCKET)
            losses = torch.empty(MICROBATCHES, dtype=torch.float64, device="meta")
            update(step, losses, torch.empty((), device="meta"), reduction.sums)
            peak()
    return [round(x, 1) for x in found]


def test_what_is_summed_or_has_arrived_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments: 8 buckets, by slice. One process has two partial sums of 4 buckets each. One of two has one, and two
    buckets under way, each with what has arrived of it; then half of the sum. With all that was sent and has arrived
    until the update, as it was, one of two had 12.2 and 8.1. The weights, 4 more, are not counted.
    """
    assert peaks(1, monkeypatch) == [8.1, *(16.2, 12.1, 13.6) * 2]
    assert peaks(2, monkeypatch) == [4.1, *(10.2, 6.1, 6.8) * 2]
    assert peaks(4, monkeypatch) == [2.1, *(7.4, 3.1, 3.4) * 2]
    # On two nodes of two: the partial sum until all is sent, what is sent and what has arrived.
    assert peaks(4, monkeypatch, flights=1) == [2.1, *(14.2, 3.1, 13.1) * 2]
    assert peaks(4, monkeypatch, flights=16) == [2.1, *(8.1, 3.1, 13.1) * 2]


def test_a_part_is_put_together_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process's weights and slices are copied, and no process writes more parts than another and one."""
    sent, half = list[int](), PART // 8
    monkeypatch.setattr(staging, "WINDOW", WINDOW)
    monkeypatch.setattr(staging, "all_to_all", lambda out, flat, *_, group: sent.append(out.nbytes + flat.nbytes))
    monkeypatch.setattr(World, "gather", lambda *_: [[0, 2], [1, 2]])
    monkeypatch.setattr(staging.lay_out, "__defaults__", (PART,))
    ranges = range(half), range(half, 2 * half)
    moments = {f"{n}": Sliced(torch.Size([2 * half]), (1,), torch.float32, ranges, torch.ones(half)) for n in range(4)}
    writers, living = staging.Staging(replace(ALONE, size=2), None, range(2)), Living(nn.Identity())
    with living:
        staged = writers.copy_share({"model": {f"w{n}": torch.zeros(2 * half) for n in range(4)}, "optimizer": moments})
        assert [[(p.kind, p.number) for p in of] for of in staged.parts] == [
            [(kind, number) for kind in ("model", "optimizer") for number in of] for of in ((1, 3), (2, 4))
        ]
        before = living.bytes
        living.points.clear()
        parts = [{name: t.nbytes for name, t in tensors.items()} for _, tensors in writers.parts(staged)]
    assert parts == [{"w0": PART}, {"w2": PART}, {"0": PART}, {"2": PART}]
    assert max(sent) == 3 * WINDOW  # to two processes, and from itself
    assert max(here for here, _ in living.points) - before == 2 * PART + 4 * WINDOW  # the one before is being written
