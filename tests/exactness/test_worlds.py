"""The claim, for every kind of run: four steps of 3 processes and eight of 2 have the bits of one alone.

Three launches train all runs of a table, one after the other.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import bpe_kit
from image_kit import write_idx
from mingpt.observe.jsonl import read_metrics
from mingpt.prepare.documents import Options
from mingpt.prepare.prepare import prepare
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from replay_kit import data_of
from run_kit import Run
from web_kit import served
from worlds_kit import train_in_world

pytestmark = pytest.mark.slow

Runs = dict[str, tuple[str, ...]]
FIGURES = ("step", "loss", "lr", "grad_norm", "val_loss", "val_accuracy", "val_loss/code", "val_loss/web")
MODERN = ("model=modern", "~model.dropout", "model.n_layer=1", "model.n_head=2", "model.n_kv_head=1", "model.n_embd=16")
ROWS = ("~model", "data._target_=examples.classifier.rows", "data.count=300", "batch.micro_size=1")
IMAGES = ("~model", "model._target_=examples.images.model.Classifier", "data._target_=examples.images.files.source")
# Weights that lie in another order than their elements, a layer that a microbatch may not use, random numbers.
MODELS = {
    "laid": "Laid",
    "strided": "Laid model.strided=true",
    "rare": "Rare",
    "right": "Rare model.right=true",
    "noisy": "Noisy",
}


def outcome(run_dir: Path) -> dict[str, Any]:
    """What is a function of (config, step): each snapshot's digest and metrics, and a run's figures."""
    store = Store(f"{run_dir}/snapshots")
    manifests = [read(store, step).manifest for step in store.steps()]
    rows = [{n: row[n] for n in FIGURES if n in row} for row in read_metrics(str(run_dir))]
    assert [row["step"] for row in rows] == list(range(1, 13))
    return {"snapshots": [(m.step, m.digest, m.metrics) for m in manifests], "figures": rows}


def train(folder: Path, runs: Runs) -> tuple[dict[str, Any], list[set[str]]]:
    """The outcomes, which must be the same in all worlds, and which runs end alike."""
    runs = {name: ("train.eval_every=4", *settings) for name, settings in runs.items()}
    moved = {f"{folder}/moved/{name}": settings for name, settings in runs.items()}
    alone = {f"{folder}/alone/{name}": settings for name, settings in runs.items()}
    train_in_world(3, moved, "train.max_steps=4")
    train_in_world(2, moved, "train.max_steps=12")
    train_in_world(1, alone, "train.max_steps=12")
    found = {name: outcome(folder / "alone" / name) for name in runs}
    assert [name for name in runs if outcome(folder / "moved" / name) != found[name]] == [
        name for name in runs if "reduce=fast" in runs[name]
    ]  # which may differ, so that this can fail
    alike = dict[str, set[str]]()
    for name, end in found.items():
        alike.setdefault(end["snapshots"][0][1], set()).add(name)
    return found, [names for names in alike.values() if len(names) > 1]


def test_models_numbers_and_batches(tmp_path: Path, text: Path, cache: Path) -> None:
    runs: Runs = {
        "3 microbatches": ("batch.global_size=12", "batch.micro_size=4"),
        "16 microbatches": ("batch.global_size=16", "batch.micro_size=1"),
        "plain": (),
        "fast": ("reduce=fast",),
        "bf16": ("precision=bf16",),
        "fp16": ("precision=fp16",),
        "compiled": ("train.compile=true", "precision=bf16"),
        "muon": ("optimizer=muon",),
        "modern": MODERN,
        "modern muon": (*MODERN, "optimizer=muon", "schedule=wsd"),
        "snapshots at each step": ("snapshot.every_steps=1", "snapshot.keep=3"),
        "snapshots by time": ("snapshot.every_steps=0", "snapshot.every_seconds=0.0001", "snapshot.keep=12"),
    }
    places = (f"data.path={text}", f"data.cache_dir={cache}")
    found, alike = train(tmp_path, {name: (*places, *settings) for name, settings in runs.items()})
    assert alike == [{"plain", "snapshots at each step", "snapshots by time"}]
    steps = {name: [step for step, _, _ in found[name]["snapshots"]] for name in runs}
    assert steps["snapshots at each step"] == [12, 11, 10]
    assert steps["snapshots by time"] == list(range(12, 0, -1))
    assert [metrics.val_loss is None for _, _, metrics in found["plain"]["snapshots"]] == [False] * 3
    for fast, exact in zip(found["fast"]["figures"], found["plain"]["figures"], strict=True):
        assert fast["loss"] == pytest.approx(exact["loss"], rel=1e-3)  # the same samples and the same law otherwise
    # A process that has trained nothing before has the bits of one that has.
    cold = Run(f"{tmp_path}/cold", text, cache, ("batch.global_size=8", "train.eval_every=4", "train.max_steps=12"))
    assert cold.start(1).wait() == 0
    assert cold.digest() == found["plain"]["snapshots"][0][1]


def test_all_data_and_models_unlike_a_gpt(tmp_path: Path, text: Path) -> None:
    runs = Runs()
    for kind in ("bpe", "shards", "documents apart", "chat", "mixture", "addition", "sort", "random"):
        how, where = data_of(kind, tmp_path / "data" / kind)
        local = () if kind in ("addition", "sort", "random", "mixture") else (f"data.cache_dir={tmp_path}/cache",)
        runs[kind] = (*how, *where, *local)
    # A block of a mixture is 8 steps: the weights change inside of one.
    runs["mixture"] += ("batch.global_size=512", "batch.micro_size=64", "model.block_size=8")
    lines, whole = tmp_path / "data" / "shards" / "lines.jsonl", tmp_path / "data" / "whole"
    prepare([str(lines)], str(whole), bpe_kit.small(), Options(val_fraction=0.1), shard_tokens=1 << 20)
    runs["shards in one"] = ("data=shards", f"data.path={whole}", f"data.cache_dir={tmp_path}/cache")
    images = ("model.side=8", "model.width=4", "data.classes=4", "data.shift=1")
    runs["images"] = (*IMAGES, *images, f"data.path={write_idx(tmp_path / 'images')}")
    for name, model in MODELS.items():
        runs[name] = (*ROWS, *f"model._target_=own_kit.{model}".split())
    with served(tmp_path / "data" / "shards" / "set") as url:  # with room for some of the shards only
        cut = (f"data.cache_dir={tmp_path}/remote", "data.cache_bytes=4000", "data.workers=1")
        runs["shards far away"] = ("data=shards", f"data.path={url}", *cut)
        found, alike = train(tmp_path, runs)
    assert alike == [{"shards", "shards in one", "shards far away"}, {"rare", "right"}]
    rows = found["mixture"]["figures"]
    assert [row["step"] for row in rows if {"val_loss/code", "val_loss/web"} <= row.keys()] == [4, 8, 12]
    used = [p.stat().st_size for p in (tmp_path / "remote" / "shards").iterdir() if p.suffix in (".bin", ".part")]
    assert sum(used) <= 4000
    ours, theirs = (
        read(Store(f"{tmp_path}/alone/{name}/snapshots"), 12).state["model"] for name in ("laid", "strided")
    )
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-5)
    losses = {row["val_loss"] for row in found["noisy"]["figures"] if "val_loss" in row}
    assert len(losses) == 3  # each evaluation draws others
