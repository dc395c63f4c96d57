"""mingpt.compute.exchange: which weights travel in 16 bits, and that nothing else of a bucket is rounded."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from mingpt.compute.buckets import Bucket, make_buckets
from mingpt.compute.exchange import pack
from mingpt.config.keys import KINDS
from mingpt.data.opening import open_data
from mingpt.model.language import LanguageModel
from mingpt.train.factory import build
from mingpt.train.setup import context_of
from tests.kits.config_kit import configured
from tests.kits.snapshot_kit import ALONE

BF16, FP16 = torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.float16)


def bucket_of(size: int, rank: int) -> Bucket:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(100, 130), torch.nn.LayerNorm(130), torch.nn.Linear(130, 37))
    (bucket,) = make_buckets(model.named_parameters(), set(), replace(ALONE, rank=rank, size=size), True)
    return bucket


@pytest.mark.parametrize("autocast", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_each_process_has_its_own_slice_whole_and_of_others_what_it_reads(size: int, autocast: Any) -> None:
    names, buckets = {"0.weight", "2.weight"}, [bucket_of(size, rank) for rank in range(size)]
    packings = [pack([bucket], names, autocast)[bucket] for bucket in buckets]
    messages = torch.stack([p.pack(b.local) for p, b in zip(packings, buckets, strict=True)])
    whole = buckets[0].weights.clone()
    for packing, bucket in zip(packings, buckets, strict=True):
        expected, own = whole.clone(), slice(bucket.owned.start, bucket.owned.stop)
        for slot in bucket.slots:
            if slot.name in names:
                bucket.view(expected, slot).copy_(bucket.view(whole, slot).to(autocast.fast_dtype))
        expected[own] = whole[own]
        bucket.weights.fill_(7)
        bucket.local.copy_(whole[own])
        packing.unpack(messages)
        for slot in bucket.slots:
            assert torch.equal(slot.parameter, bucket.view(expected, slot)), slot.name
        assert set(packing.sliced_weights()) == names
        rounded, biases = {2: (12288, 640), 3: (8192, 640), 7: (4096, 576)}[size]  # of the slice that has most
        assert packing.length == 2 * rounded + 4 * biases


@pytest.mark.parametrize(
    ("model", "packed"), [("model=gpt-nano", True), ("model._target_=tests.kits.own_kit.derived", False)]
)
def test_a_users_class_over_ours_is_not_rounded(model: str, packed: bool) -> None:
    """It may read its matrices in float32, or share them between layers."""
    config = configured(model, "model.block_size=4", "data=random", "precision=bf16", "batch.micro_size=1")
    source, world = open_data(config.data, 4, 1), replace(ALONE, size=2)
    context = context_of(config, source, build(config, source.vocabulary.size), world)
    assert bool(context.update.weight_gather.in_16_bits) == packed


@pytest.mark.parametrize(("name", "matrices"), [("gpt-nano", 3 * 4), ("modern-nano", 3 * 7)])
def test_rounding_what_layers_read_changes_no_bit_of_loss_and_gradients(name: str, matrices: int) -> None:
    """Whatever is in `linear_matrices` must be read under autocast alone."""
    assert list(KINDS["model"]) == ["gpt", "modern", "own"], "try the new kind here, too"
    torch.manual_seed(0)
    model = build(configured(f"model={name}", "model.block_size=8"), 65)
    assert isinstance(model, LanguageModel)
    names, tokens, found = model.linear_matrices(), torch.randint(65, (2, 8)), []
    assert len(names) == matrices
    buckets = make_buckets(model.named_parameters(), set(), replace(ALONE, size=2), True)
    assert pack(buckets, names, BF16)
    assert pack(buckets, names, nullcontext()) == {}
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    for narrow in (False, True):
        for n, p in model.named_parameters():
            if narrow and n in names:
                p.data = p.data.bfloat16().float()
        model.zero_grad()
        torch.manual_seed(1)
        with BF16:
            loss, _ = model(tokens, tokens)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
