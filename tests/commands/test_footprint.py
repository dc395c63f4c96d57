"""How many bytes a process needs (commands/footprint.py), against what the real classes and processes take."""

import torch

from mingpt.commands.footprint import changed, footprint, look_at
from mingpt.train.factory import build
from tests.kits.config_kit import configured

SHAPE = ("model=gpt2", "model.n_layer=3", "model.n_head=2", "model.n_embd=64", "model.block_size=64", "data=random")
BATCH = ("data.vocabulary=1000", "batch.micro_size=4", "batch.global_size=32", "snapshot.hot_every_steps=0")
SMALL = (*SHAPE, *BATCH)


def test_a_microbatch_is_counted_by_the_byte() -> None:
    """What autograd keeps for backward, and at the end the gradients alone, with the loss and the count."""
    config = configured(*SMALL)
    found, model = look_at(config), build(config, 1000)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.gradients == 4 * found.parameters
    last, finished = found.points[-1]
    assert (finished, last - finished) == (found.gradients, 4 * 64 * 8 + 3 * 4)  # the targets; loss, count, and a 1
    storages, kept = dict[int, int](), found.kept

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens, targets = (torch.zeros(4, 64, dtype=torch.int64) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, targets)
    for given in (*model.parameters(), tokens, targets):
        storages.pop(given.untyped_storage().data_ptr(), None)
    assert found.peak(1) > kept >= sum(storages.values()) > 0.95 * kept


def test_settings_that_spare_memory_do() -> None:
    config = configured(*SMALL)

    def step(key: str = "batch.micro_size", value: object = 4, processes: int = 2) -> int:
        other = changed(config, key, value)
        return footprint(other, look_at(other), processes, processes).step

    assert step("train.recompute", "block") < step()
    assert step("train.loss_rows", 16) < step()
    assert step("batch.micro_size", 2) < step()
    whole = changed(config, "optimizer.shard", False)
    model = look_at(config)
    halves = [footprint(c, model, 2, 2).steady["optimizer state"] for c in (config, whole)]
    assert 1.9 < halves[1] / halves[0] <= 2
    hot = footprint(changed(config, "snapshot.hot_every_steps", 1), model, 2, 2).hot
    assert [*hot.values()] == [2 * 3 * 4 * model.parameters]  # weights and two moments, twice
    parts = footprint(config.model_copy(update={"reduce": "fast"}), model, 2, 2).parts
    assert [bytes for name, bytes in parts.items() if "gradients" in name] == [4 * model.parameters, 0]


def test_a_graph_keeps_the_memory_of_a_microbatch_beside_all_others() -> None:
    """32 samples by 4: of one process, three partial sums are there at most; of two, two each."""
    config = configured(*SMALL)
    model = look_at(config)
    g = 4 * model.parameters
    pool = model.peak(0) + g  # a microbatch whose gradients go to a place of their own
    assert pool > model.kept + g
    for processes, sums in ((1, 3), (2, 2)):
        now, graphs = (footprint(config, model, processes, processes, graphs) for graphs in (False, True))
        assert graphs.steady == now.steady | {"CUDA graph of a microbatch": pool}
        eager = now.phases["the last microbatch, and the exchange"]
        assert graphs.phases == {
            "a microbatch": sums * g,
            "the last microbatch, and the exchange": sums * g
            if processes == 1
            else eager,  # the latter without a graph
            "update": now.phases["update"],
            "evaluation": model.evaluation,
        }
    logits = 4 * 4 * 64 * 1024  # of 1000 tokens, padded
    assert logits < model.evaluation < model.kept
    fast = config.model_copy(update={"reduce": "fast"})
    assert footprint(fast, model, 2, 2, graphs=True) == footprint(fast, model, 2, 2)
    alone = changed(config, "batch.global_size", 4)  # one microbatch: its gradients are copied, as the sums
    assert footprint(alone, model, 1, 1, graphs=True).step == max(g, model.evaluation)


def test_one_nodes_disk_gets_the_slices_of_the_others_and_sends_every_process_all() -> None:
    """Two nodes of two processes. A file's URL is a folder, too; a bucket gets all from each."""
    config, url, bucket = (configured(*SMALL, f"run.dir={place}/run") for place in ("/x", "file:///x", "s3://x"))
    model = look_at(config)
    state = 3 * 4 * model.parameters  # weights and two moments
    quarter = -(-2 * 4 * model.parameters // 4)  # of the moments
    found, of_url = (footprint(of, model, 4, 2) for of in (config, url))
    assert (of_url.network, of_url.snapshots) == (found.network, found.snapshots)
    sent, fetched = found.network.values()
    assert (sent, fetched) == (2 * quarter, 2 * state)
    whole = footprint(changed(config, "optimizer.shard", False), model, 4, 2).network
    assert [*whole.values()] == [0, 2 * state]
    assert footprint(bucket, model, 4, 2).network == footprint(config, model, 2, 2).network == {}
