"""One process of a world that trains small models on slices of their state, and prints what bits came out.

Arguments: rank, world size, processes of a node, a file for the rendezvous, a folder for snapshots. Prints one JSON
object: by case the digest of a snapshot.
"""

import json
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mingpt.compute.buckets import make_buckets
from mingpt.compute.groups import muon_names, roles, rules
from mingpt.compute.narrow import pack
from mingpt.compute.optimizer import Update
from mingpt.compute.reduction import ExactReduction
from mingpt.config.schema import Health, Optimizer, Schedule
from mingpt.snapshot.format import TensorInfo, digest_of, encode_part
from mingpt.snapshot.staging import Staging
from mingpt.world.joining import by_nodes
from mingpt.world.world import World

MICROBATCHES, STEPS, WIDTH = 7, 4, 96
BUCKET_BYTES = 40_000  # several buckets, of up to nine chunks each; and one for the wide matrix
ADAM, MUON = Optimizer(clip_norm=0.5), Optimizer(name="muon", lr=0.02, clip_norm=0.5)
FP32, BF16, FP16 = nullcontext(), torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.float16)
CASES = {
    "adamw": (ADAM, FP32, True),
    "unsharded": (ADAM, FP32, False),
    "fp16": (ADAM, FP16, True),
    "bf16": (ADAM, BF16, True),
    "bf16 unsharded": (ADAM, BF16, False),
    "muon": (MUON, FP32, True),
    "muon unsharded": (MUON, FP32, False),
    "muon bf16": (MUON, BF16, True),
    "muon bf16 unsharded": (MUON, BF16, False),
}
NARROW = {"first.weight", "second.weight", "rare.weight"}  # under autocast these travel in 16 bits


class Net(nn.Module):
    """Matrices of several sizes, one of them in another memory order, a frozen one, norms, and one rarely used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.turned = nn.Parameter(torch.randn(WIDTH, 70).t() / 8)
        self.rare, self.norm, self.frozen = nn.Linear(70, 33), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        y = self.norm(self.frozen(self.second(torch.tanh(self.first(x))))) @ self.turned.t()
        return (self.rare(y) if rare else y).square().sum()


def train(config: Optimizer, autocast: Any, shard: bool, world: World, folder: Path) -> str:
    model = Net()
    named, role_of = [(n, p) for n, p in model.named_parameters() if p.requires_grad], roles(model)
    buckets = make_buckets(named, muon_names(config.name, role_of), world, shard, BUCKET_BYTES)
    assert len(buckets) > 3
    packings = {} if autocast is FP32 else pack(buckets, NARROW, autocast)
    assert bool(packings) == (world.size > 1 and shard and autocast is not FP32)
    update = Update(
        buckets,
        rules(named, config, role_of),
        config,
        Schedule(kind="constant", warmup_steps=0),
        world,
        global_size=1,
        tokens_per_microbatch=8,
        fp16=autocast is FP16,
        health=Health(),
        packings=packings,
    )
    reduction, mine = ExactReduction(buckets, MICROBATCHES, world), world.share(MICROBATCHES)
    for step in range(STEPS):
        reduction.begin()
        for m in mine:
            draw = torch.Generator().manual_seed(step * 100 + m)
            scale = torch.inf if step == 2 and m == 5 else 10.0 ** (m % 5 - 2)  # step 2 is skipped
            if m == mine[-1]:
                reduction.arm(m)
            with autocast:
                loss = model(torch.randn(8, WIDTH, generator=draw) * scale, m % 3 == 1)
            update.scaled(loss).backward()
            if m != mine[-1]:
                reduction.push(m)
        reduction.finish()
        update(step, torch.zeros(MICROBATCHES).double(), torch.tensor(8.0 * MICROBATCHES), reduction.sums)
    staging = Staging(world)
    own = {name: part for packing in packings.values() for name, part in packing.own().items()}
    staged = staging.copy_share({"model": {**model.state_dict(), **own}, "optimizer": update.state()})
    infos = list[dict[str, Any]]()
    for part in (encode_part(*one) for one in staging.parts(staged)):
        (folder / part.name).write_bytes(b"".join(part.pieces))
        infos.append({n: t.model_dump() for n, t in part.tensors.items()})
    everywhere = [info for infos in world.gather(infos) for info in infos]
    return digest_of({n: TensorInfo(**t) for info in everywhere for n, t in info.items()})


def main() -> None:
    rank, size, each = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    store = dist.FileStore(sys.argv[4], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    world = by_nodes(World(rank, size, rank, torch.device("cpu"), "gloo"), each, 120)
    found = {name: train(*case, world, Path(sys.argv[5])) for name, case in CASES.items()}
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
