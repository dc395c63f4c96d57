"""`mingpt evaluate`: the training's own figures again, in any world, or on other data."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from mingpt.history.history import read_metrics
from mingpt.snapshot.format import Metrics
from mingpt.snapshot.reader import read
from mingpt.snapshot.retention import Retention
from mingpt.snapshot.writer import SnapshotWriter
from tests.kits.branch_kit import train
from tests.kits.run_kit import TIME_LIMIT
from tests.kits.snapshot_kit import ALONE, PROVENANCE, save
from tests.kits.told import Told
from tests.kits.verb_kit import mingpt, store

CACHE = "data.cache_dir=made"
# A refusal in a world, which ends its process soon after, ends only the command.
pytestmark = pytest.mark.usefixtures("base", "outlived")


@pytest.fixture
def place(text: Path) -> str:
    """Where the text is, an absolute path, is not taken from a snapshot."""
    return f"data.path={text}"


def test_the_figures_are_those_that_training_has_measured(text: Path) -> None:
    """bits_per_byte: of the bytes of a character, of which é has two."""
    (wide := Path("wide.txt")).write_text(text.read_text().replace("e", "é"))
    train(Path("run"), wide, Path("cache"))
    train(Path("all"), wide, Path("cache"), "train.eval_batches=0")
    assert read_metrics("all")[7]["val_loss"] == read_metrics("run")[7]["val_loss"]
    row, found = read_metrics("run")[7], mingpt.json(f"evaluate run@8 data.path={wide}")
    assert (found["step"], found["loss"]) == (8, row["val_loss"])  # to the bit
    assert (found["bits_per_byte"], found["perplexity"]) == (row["val_bits_per_byte"], math.exp(row["val_loss"]))
    # A tenth of 6,000 characters, but for the first.
    assert (row["val_tokens"], row["val_share"]) == (599, 1)
    assert (found["targets"], found["bytes"]) == (599, len(wide.read_text()[5401:].encode()))
    bits = found["loss"] * 599 / math.log(2) / found["bytes"]
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    assert "accuracy" not in found


def test_the_mean_of_the_weights_takes_their_place_if_asked_for(place: str, text: Path, told: Told) -> None:
    """Of the verbs that use a model; a weight that is frozen is its own mean."""
    train(Path("run"), text, Path("cache"), "optimizer.ema=0.5", "train.freeze=[transformer.wte.*]")
    loaded = read(store(), 12)
    means = {name: loaded.state["optimizer"].get(f"{name}.ema", w) for name, w in loaded.state["model"].items()}
    provenance = {key: getattr(loaded.manifest, key) for key in PROVENANCE}
    save(store("means"), 12, {"model": means, "optimizer": {}}, provenance=provenance)
    found = []
    for i, (url, option) in enumerate((("run", "--ema"), ("means", ""), ("run", ""))):
        mingpt(f"export {url} out/{i} {option}")
        loss = mingpt.json(f"evaluate {url} {place} {CACHE} {option}")["loss"]
        drawn = mingpt(f"generate {url} --temperature 9 {option}")
        found.append((loss, drawn, Path(f"out/{i}/model.safetensors").read_bytes()))
    assert found[0] == found[1]
    assert not any(one == other for one, other in zip(found[0], found[2], strict=True))
    told(mingpt.refused("export base out/none --ema"))
    assert not Path("out/none").exists()


def test_the_best_snapshot_is_exported_if_asked_for_and_hinted_at() -> None:
    loaded = read(store("base"), 12)
    provenance = {key: getattr(loaded.manifest, key) for key in PROVENANCE}
    for step, val_loss in ((4, 1.0), (12, 2.0)):
        writer = SnapshotWriter(store("over"), ALONE, Retention(9), provenance, log=print)
        writer.save(step, loaded.state, Metrics(loss=1.0, val_loss=val_loss, best_val_loss=1.0))
    hinted, best = mingpt("export over out/12"), mingpt("export over@best out/4")
    assert "RUN@best" in hinted
    assert best.startswith("step 4 ")


@pytest.mark.slow
def test_several_processes_find_the_same_and_one_of_them_tells(place: str) -> None:
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node=3 -m mingpt evaluate base --json"
    said = subprocess.check_output([sys.executable, *torchrun.split(), place, CACHE], text=True, timeout=TIME_LIMIT)
    assert [json.loads(line) for line in said.splitlines()] == [mingpt.json(f"evaluate base {place} {CACHE}")]


def test_other_data_is_told_in_the_snapshots_vocabulary() -> None:
    Path("other.txt").write_text("the queen is dead\n" * 40)  # fewer characters than the model knows
    here = "evaluate base data.path=other.txt data.val_fraction=0.5"
    first, *losses = [mingpt.json(f"{here} {more}")["loss"] for more in ("", "data=byte", "batch.micro_size=64")]
    assert losses == [first, pytest.approx(first, rel=1e-5)]
    assert mingpt.json(here)["targets"] == 359


@pytest.mark.parametrize(
    "arguments",
    [
        "model.n_layer=3", "data.pth=x", "data.path=none", "--step=5", "data.val_fraction=0", "data.path=digits.txt",
    ],
)  # fmt: skip
def test_mistakes(arguments: str, place: str, told: Told) -> None:
    Path("digits.txt").write_text("0123456789" * 20)
    told(mingpt.refused(f"evaluate base {place} {arguments}"))
