"""train.compile: what the compiled loss writes to memory. On a GPU that is most of what it does."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from mingpt.model.language import IGNORE
from tests.kits.model_kit import BLOCK, PADDED, WORDS, random_tokens, small

pytestmark = pytest.mark.slow  # torch's compiler is imported

BATCH = 3


@pytest.mark.parametrize(
    ("kind", "words", "weighted"), [("gpt", WORDS, False), ("modern", WORDS, True), ("gpt", PADDED, False)]
)
def test_training_writes_no_float32_logits(
    monkeypatch: pytest.MonkeyPatch, kind: str, words: int, weighted: bool
) -> None:
    """It keeps the matrix product for backward, in 16 bits."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    # By graph that is compiled, in order: the types of its results that are as large as the logits. What a forward
    # graph keeps for backward is among its results.
    written = list[list[torch.dtype]]()

    def look(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        (results,) = next(node for node in graph.graph.nodes if node.op == "output").args
        values = [node.meta["val"] for node in results if node is not None]
        logits = BATCH * BLOCK * PADDED
        written.append([value.dtype for value in values if isinstance(value, Tensor) and value.numel() == logits])
        return make_boxed_func(graph.forward)

    # As torch's own compiler, but for the kernels.
    partition = partial(min_cut_rematerialization_partition, compiler="inductor")
    tables = {"partition_fn": partition, "decompositions": select_decomp_table()}
    backend = aot_autograd(fw_compiler=look, bw_compiler=look, **tables)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model, tokens = small(kind, words).train(), random_tokens(BATCH, BLOCK)
    targets = tokens.roll(1, 1)
    targets[0, 2:5] = IGNORE
    weights = torch.rand(BATCH, BLOCK) if weighted else None
    with torch.autocast("cpu", torch.bfloat16):
        whole = model.loss_and_logits(tokens, targets, weights)
        model.prepare_loss(True, 0)
        loss, count = model(tokens, targets, weights)
        loss.backward()
        assert written == [[torch.bfloat16], []]
        torch.testing.assert_close((loss, count), whole[:2])
