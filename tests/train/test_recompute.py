"""train.recompute=block: what is not kept is computed again, with the same bits."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from config_kit import configured
from mingpt.config.schema import WorldConfig
from mingpt.train.bench import Bench
from mingpt.world.joining import join
from run_kit import TINY


@pytest.mark.parametrize(("model", "more"), [("gpt-nano", ("model.dropout=0.1",)), ("modern-nano", ())])
def test_the_bits_are_the_same_and_less_is_kept(model: str, more: tuple[str, ...], text: Path, cache: Path) -> None:
    found = {}
    shape = (f"model={model}", "model.n_layer=4", "model.block_size=32")
    places = (f"data.path={text}", f"data.cache_dir={cache}")
    with join(WorldConfig(device="cpu")) as world:
        for recompute in ("none", "block"):
            rest = [o for o in TINY if not o.startswith("model")]
            config = configured(*rest, *shape, *more, *places, f"train.recompute={recompute}")
            source = config.data.open(config.model.block_size, config.batch.micro_size)
            bench, kept = Bench(config, source, world, 1), list[int]()

            def pack(tensor: Tensor, kept: list[int] = kept) -> Tensor:
                kept.append(0 if isinstance(tensor, torch.nn.Parameter) else tensor.nbytes)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                figures = [bench.step(step) for step in range(2)]
            state = [t.clone() for tensors in bench.state().values() for t in tensors.values()]
            found[recompute] = figures[-1].losses, figures[-1].grad_norm, state, sum(kept)
    assert found["none"][:2] == found["block"][:2]
    assert all(torch.equal(a, b) for a, b in zip(found["none"][2], found["block"][2], strict=True))
    assert found["block"][3] < found["none"][3]
