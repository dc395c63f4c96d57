"""`python benchmarks/fully_shard_bits.py [--worlds 2 3 4]`: where torch's fully_shard keeps the bits. Prints JSON.

A small GPT is wrapped block by block, with a reduce-scatter of our own (set_custom_reduce_scatter) that adds the
processes' gradients along the tree. Each process also computes everything alone, and compares its slices with that:

Figures are how many tensors have other bits, in any process.

one round: the gradients of one microbatch a process.
several rounds: those of four, as fully_shard adds them up in .grad; taken out: if .grad is taken after each round, and
the rounds are added along the tree.
update: torch's fused AdamW, on its rows of the right gradients, against that of whole tensors.
sums that a round leaves: of its processes' gradients, along the tree over 16 microbatches; its output has room for one.
bf16: the loss under its MixedPrecisionPolicy, against autocast's.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from mingpt.compute.tree import tree_sum_of, whole_subtrees
from mingpt.model.gpt2 import GPT, GPTConfig

WIDTH, BLOCK, VOCABULARY, ROUNDS, MICROBATCHES = 40, 16, 50, 4, 16


class TreeScatter:
    """A reduce-scatter that only moves bytes; the additions are the tree's. op: what fully_shard asks for (a mean).

    The base class, ReduceScatter, is not public in torch 2.13; nothing of it is needed.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(tree_sum_of(received.view(group.size(), -1).unbind()))


def model() -> GPT:
    torch.manual_seed(1)
    return GPT(GPTConfig(vocab_size=VOCABULARY, block_size=BLOCK, n_layer=2, n_head=2, n_embd=WIDTH))


def sharded(policy: MixedPrecisionPolicy = MixedPrecisionPolicy()) -> Any:  # noqa: B008
    whole = model()
    for module in (*whole.blocks(), whole):
        fully_shard(module, mp_policy=policy).set_custom_reduce_scatter(TreeScatter())
    return whole


def batch(microbatch: int) -> list[Tensor]:
    text = torch.randint(VOCABULARY, (2, BLOCK + 1), generator=torch.Generator().manual_seed(microbatch))
    return [text[:, :-1].contiguous(), text[:, 1:].contiguous()]


def local(tensor: Any) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def gradients(microbatches: Sequence[int]) -> dict[str, Tensor]:
    """In one process alone, added along the tree."""
    alone, found = model(), list[list[Tensor]]()
    for m in microbatches:
        alone.zero_grad()
        alone(*batch(m))[0].backward()
        found.append([p.grad for p in alone.parameters() if p.grad is not None])
    return {n: tree_sum_of(g) for (n, _), *g in zip(alone.named_parameters(), *found, strict=True)}


def mine(whole: Tensor) -> Tensor:
    """This process's rows, as fully_shard cuts them."""
    pieces, rank = whole.chunk(dist.get_world_size()), dist.get_rank()
    return pieces[rank] if rank < len(pieces) else whole[:0]


def updated(weights: Tensor, gradient: Tensor) -> Tensor:
    """Weights and moments after a second step. By element, so each process could do it for its rows."""
    state = [weights.clone(), gradient * 0.1, gradient.square() * 0.05]
    adamw([state[0]], [gradient], [state[1]], [state[2]], [], [torch.ones(())], fused=True, amsgrad=False,
          beta1=0.9, beta2=0.95, lr=1e-2, weight_decay=0.1, eps=1e-8, maximize=False)  # fmt: skip
    return torch.stack(state, -1)


def work() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()

    def others(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
        """How many tensors differ somewhere, in any process."""
        wrong = torch.tensor([float(not torch.equal(found[n], mine(whole))) for n, whole in wanted.items()])
        dist.all_reduce(wrong, op=dist.ReduceOp.MAX)
        return f"{int(wrong.sum())} of {len(wanted)}"

    wrapped = sharded()
    rounds = list[dict[str, Tensor]]()
    for k in range(ROUNDS):
        wrapped(*batch(k * size + rank))[0].backward()
        rounds.append({n: local(p.grad).clone() for n, p in wrapped.named_parameters()})
        wrapped.zero_grad()
    for k in range(ROUNDS):
        wrapped(*batch(k * size + rank))[0].backward()
    kept = {n: local(p.grad).clone() for n, p in wrapped.named_parameters()}
    taken = {n: tree_sum_of([r[n] for r in rounds]) for n in rounds[0]}
    one, both = gradients(range(size)), gradients(range(ROUNDS * size))
    weights = dict(model().named_parameters())
    row = {
        "processes": size,
        "one round": others(rounds[0], one),
        "sums that a round leaves": max(
            len(whole_subtrees(first, first + size, 0, MICROBATCHES)) for first in range(0, MICROBATCHES, size)
        ),
        "several rounds": others(kept, both),
        "several rounds, taken out": others(taken, both),
        "update": others(
            {n: updated(mine(w.detach()), mine(both[n]).contiguous()) for n, w in weights.items()},
            {n: updated(w.detach(), both[n]) for n, w in weights.items()},
        ),
    }
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            wanted = model()(*batch(0))[0].item()
        row["bf16"] = [sharded(MixedPrecisionPolicy(param_dtype=torch.bfloat16))(*batch(0))[0].item(), wanted]
    if rank == 0:
        print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work()
    for world in options.worlds:
        launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}")
        subprocess.run([*launch, __file__, "--work"], check=True)


if __name__ == "__main__":
    main()
