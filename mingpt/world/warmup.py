"""Has NCCL take its memory before the model does.

NCCL takes it at the first use of a connection. Later, torch's allocator may hold all the rest: torch gives back what it
does not use when it needs memory itself, but not when NCCL does.
"""

import torch

from mingpt.world.world import World, all_gather, all_reduce, all_to_all


def warm_up(world: World, elements: int, owners: bool) -> None:
    """Call the collectives of a step once, with as many elements as the largest has, in each group. Collective.

    owners: whether whole tensors are sent to their owners.
    """
    for part in filter(None, (world, world.inside, world.across)):
        each = -(-elements // part.size)  # rounded up, as a bucket is cut
        sent = torch.zeros(part.size * each, device=world.comm_device)
        received = torch.empty_like(sent)
        # With two hops and without owners, the group of all processes sends nothing from each to each in a step. Tried
        # here, it would make its connections: with 512 processes 511 of each, with their buffers.
        if part is not world or owners or not world.inside:
            all_to_all(received, sent, group=part.group)
        all_gather(received, sent[:each], group=part.group)
        all_reduce(sent, group=part.group)
        received.sum().item()  # waits: an error comes here
