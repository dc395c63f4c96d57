"""The claim, for every kind of run: four steps in one world and eight in another have the bits of one process alone.

The processes of a world train all runs of a table, one after the other. What has no mechanism of its own is not in it.
"""

from pathlib import Path
from typing import Any

import pytest

from mingpt.compute.buckets import BUCKET_BYTES
from mingpt.history.history import read_metrics
from mingpt.replay.replaying import replay
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from tests.kits.image_kit import write_idx
from tests.kits.poison_kit import GUARDED, POISONED, poison
from tests.kits.replay_kit import data_of
from tests.kits.web_kit import served
from tests.kits.weights_kit import saved
from tests.kits.worlds_kit import train_in_world

pytestmark = pytest.mark.slow

Runs = dict[str, tuple[str, ...]]
FIGURES = ("step", "loss", "lr", "grad_norm", "val_loss", "val_accuracy", "val_loss/code", "val_loss/web")
MODERN = (
    "model=modern", "~model.dropout", "model.n_layer=1", "model.n_head=2", "model.n_kv_head=1", "model.n_embd=16",
    "optimizer=muon", "schedule=wsd", "precision=bf16",
)  # fmt: skip
WHOLE = "optimizer.shard=false"
LION, ADAFACTOR = (f"optimizer._target_=examples.own_optimizer.{name}" for name in ("Lion", "Adafactor"))
# Two batches in a row that no finite number comes of: the run goes back, and leaves them out.
BAD = ("~model", *POISONED, *GUARDED, *poison([2, 6, 7], 1e25), "snapshot.every_steps=4")
ROWS = ("~model", "data._target_=examples.classifier.rows", "data.count=300", "batch.micro_size=1")
# Weights that lie in another order than their elements, a layer that a microbatch may not use, random numbers.
MODELS = {"strided": "Laid", "rare": "Rare", "right": "Rare model.right=true", "noisy": "Noisy"}
IMAGES = (
    "~model", "model._target_=examples.images.model.Classifier", "data._target_=examples.images.files.source",
    "model.side=8", "model.width=4", "data.classes=4", "data.shift=1",
)  # fmt: skip


def outcome(run_dir: str) -> dict[str, Any]:
    """What is a function of (config, step): each snapshot's digest and metrics, and a run's figures."""
    store = Store(f"{run_dir}/snapshots")
    manifests = [read(store, step).manifest for step in store.steps()]
    rows = [{n: row[n] for n in FIGURES if n in row} for row in read_metrics(run_dir)]
    assert [row["step"] for row in rows] == list(range(1, 13))
    return {"snapshots": [(m.step, m.digest, m.metrics, sorted(m.parts)) for m in manifests], "figures": rows}


def train(folder: Path, runs: Runs, worlds: tuple[int, int], bucket_bytes: int) -> tuple[Any, list[set[str]]]:
    """The outcomes, which must be the same in all worlds, and which runs end alike. Four processes are two nodes."""
    runs = {name: ("train.eval_every=4", *settings) for name, settings in runs.items()}
    alone, moved = ({f"{folder}/{place}/{name}": runs[name] for name in runs} for place in ("alone", "moved"))
    train_in_world(worlds[0], moved, "train.max_steps=4", nodes=worlds[0] // 2, bucket_bytes=bucket_bytes)
    train_in_world(worlds[1], moved, "train.max_steps=12", bucket_bytes=bucket_bytes)
    train_in_world(1, alone, "train.max_steps=12", bucket_bytes=bucket_bytes)
    found = {name: outcome(f"{folder}/alone/{name}") for name in runs}
    assert [name for name in runs if outcome(f"{folder}/moved/{name}") != found[name]] == [
        name for name in runs if "reduce=fast" in runs[name]
    ]  # which may differ, so that this can fail
    alike = dict[str, set[str]]()
    for name, end in found.items():
        alike.setdefault(end["snapshots"][0][1], set()).add(name)
    return found, [names for names in alike.values() if len(names) > 1]


def test_models_numbers_and_batches(tmp_path: Path, text: Path, cache: Path) -> None:
    saved(tmp_path / "gpt2", vocab_size=len(set(text.read_text())), n_head=3)
    runs: Runs = {
        "5 microbatches": ("batch.global_size=10",),
        "plain": (),
        "a batch that grows": ("batch.global_size=16", "batch.micro_size=4", "batch.double_at=[3,6]"),
        "whole": (WHOLE,),
        "snapshots by time": ("snapshot.every_steps=0", "snapshot.every_seconds=0.0001", "snapshot.keep=12"),
        "texts": ("train.sample_every=1",),
        "fast": ("reduce=fast",),
        "bf16": ("precision=bf16",),
        "bf16 whole": ("precision=bf16", WHOLE),
        "fp16": ("precision=fp16",),
        "muon": MODERN,
        "muon whole": (*MODERN, WHOLE),
        "mean of the weights": (*MODERN, "optimizer.ema=0.9"),
        "lion": (LION,),
        "lion whole": (LION, WHOLE),
        "adafactor": (ADAFACTOR, "precision=bf16"),
        "adafactor whole": (ADAFACTOR, "precision=bf16", WHOLE),
        "loss rows": ("train.loss_rows=5",),
        "finetune": (f"model.init_from={tmp_path}/gpt2", "train.freeze=[transformer.wte.*,'transformer.h.[0].*']"),
    }
    places = (f"data.path={text}", f"data.cache_dir={cache}")
    runs = {name: (*places, *settings) for name, settings in runs.items()}
    found, alike = train(tmp_path, runs, (4, 2), 9000)  # several buckets, though the models are tiny
    assert alike == [
        {"plain", "whole", "snapshots by time", "texts"},
        {"bf16", "bf16 whole"},
        {"muon", "muon whole"},
        {"lion", "lion whole"},
        {"adafactor", "adafactor whole"},
    ]
    assert [step for step, *_ in found["snapshots by time"]["snapshots"]] == list(range(12, 0, -1))
    for fast, exact in zip(found["fast"]["figures"], found["plain"]["figures"], strict=True):
        assert fast["loss"] == pytest.approx(exact["loss"], rel=1e-3)  # the same samples and the same law otherwise


def test_replayed_microbatches(tmp_path: Path, text: Path, cache: Path) -> None:
    """Each process's microbatches are replays of one graph but the last, which it sends; or one process has none."""
    places = (f"data.path={text}", f"data.cache_dir={cache}", "train.eval_every=4", "train.max_steps=12")
    runs: Runs = {
        "plain": ("batch.global_size=16",),
        "7 microbatches in fp16": ("batch.global_size=14", "precision=fp16"),
        "muon": ("batch.global_size=16", *MODERN),
    }
    how: dict[str, tuple[int, bool, int | None]] = {
        "computed": (1, False, None), "1": (1, True, None), "2": (2, True, None), "3": (3, True, None),
        "mixed": (3, True, 1),
    }  # fmt: skip
    for name, (world, graphs, except_rank) in how.items():
        here = {f"{tmp_path}/{name}/{run}": (*places, *settings) for run, settings in runs.items()}
        train_in_world(world, here, bucket_bytes=9000, graphs=graphs, except_rank=except_rank)
    for run in runs:
        found = [outcome(f"{tmp_path}/{name}/{run}") for name in how]
        assert found == [found[0]] * len(how), run


@pytest.mark.nightly
def test_compiled(tmp_path: Path, text: Path, cache: Path) -> None:
    """On its own, since it takes a hundred times as long as all others. The second attempt meets one shape alone."""
    places = (f"data.path={text}", f"data.cache_dir={cache}")
    grows = ("batch.global_size=16", "batch.micro_size=4", "batch.double_at=[3]")
    how = (*places, *grows, "train.compile=true", "precision=bf16", "model.n_layer=1")
    train(tmp_path, {"compiled": how}, (2, 1), 9000)


def test_all_data_and_models_unlike_a_gpt(tmp_path: Path) -> None:
    runs = {name: (*ROWS, *f"model._target_=tests.kits.own_kit.{model}".split()) for name, model in MODELS.items()}
    runs |= {f"strided {own[-4:]}": (*runs["strided"], own) for own in (LION, ADAFACTOR)}
    runs |= {"bad steps": BAD, "images": (*IMAGES, f"data.path={write_idx(tmp_path / 'images')}")}
    places = dict[str, tuple[str, ...]]()
    for kind in ("shards", "documents apart", "chat", "mixture"):
        how, places[kind] = data_of(kind, tmp_path / "data" / kind)
        local = () if kind == "mixture" else (f"data.cache_dir={tmp_path}/cache",)
        runs[kind] = (*how, *places[kind], *local)
    # A block of a mixture is 8 steps: the weights change inside of one.
    runs["mixture"] += ("batch.global_size=512", "batch.micro_size=64", "model.block_size=8")
    with served(tmp_path / "data" / "shards" / "set") as url:  # with room for some of the shards only
        cut = (f"data.cache_dir={tmp_path}/remote", "data.cache_bytes=4000", "data.workers=1")
        runs["shards far away"] = ("data=shards", f"data.path={url}", *cut)
        found, alike = train(tmp_path, runs, (2, 3), BUCKET_BYTES)
    assert alike == [{"rare", "right"}, {"shards", "shards far away"}]
    rows = found["mixture"]["figures"]
    assert [row["step"] for row in rows if {"val_loss/code", "val_loss/web"} <= row.keys()] == [4, 8, 12]
    with replay(f"{tmp_path}/moved/chat", 6, places["chat"]) as run:  # what three processes have recorded
        assert [run.advance().same for _ in range(2)] == [True] * 2
        assert run.stretch.world_size == 3
