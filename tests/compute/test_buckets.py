"""mingpt.compute.buckets: where parameters lie, and which elements are whose."""

from dataclasses import replace

import pytest
import torch

from mingpt.compute.buckets import CHUNK, START, make_buckets
from tests.kits.snapshot_kit import ALONE


@pytest.mark.parametrize("size", range(1, 9))
def test_the_slices_of_a_bucket_tile_it_whatever_the_world(size: int) -> None:
    """Where a parameter and a chunk lie does not depend on the world; whose they are does."""
    places = []
    for rank in range(size):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(100, 130), torch.nn.Linear(130, 37))
        weights = [p.detach().clone() for p in model.parameters()]
        (bucket,) = make_buckets(model.named_parameters(), set(), replace(ALONE, rank=rank, size=size), True)
        assert [(slot.name, slot.start) for slot in bucket.slots] == [
            ("1.bias", 0), ("1.weight", 64), ("0.bias", 4928), ("0.weight", 5120),
        ]  # fmt: skip
        assert bucket.chunks == 5
        assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
        assert (len(bucket.owned) % CHUNK, bucket.owned.start % CHUNK) == (0, 0)
        for slot, part in bucket.pieces(bucket.owned):
            assert (part.start % START, (part.stop - part.start) % START) == (0, 0), slot.name
        places.append(list(bucket.owned))
        ranges = [bucket.ranges(slot) for slot in bucket.slots]
        assert [[i for r in by_rank for i in r] for by_rank in ranges] == [
            list(range(slot.parameter.numel())) for slot in bucket.slots
        ]
    assert [i for owned in places for i in owned] == list(range(len(bucket.weights)))
