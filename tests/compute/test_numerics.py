"""What a run's bits depend on is recorded; this package's own part is held by golden values."""

import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mingpt.compute.batches import BatchPlan, derive
from mingpt.compute.numerics import NUMERICS, changes, cpu_vendor, fingerprint, probe
from mingpt.compute.optimizer import schedule_factor, sums_of_squares
from mingpt.compute.stats import StepStats
from mingpt.compute.tree import tree_sum_of
from mingpt.config.imports import imported_sha256
from mingpt.config.schema import Health, Optimizer, Schedule
from mingpt.train.factory import build
from tests.kits.config_kit import configured
from tests.kits.update_kit import sums_of, update_of

CPU = torch.device("cpu")
RAISE = "this package computes other bits than before: raise numerics.NUMERICS, and add a row with these values"

# By NUMERICS: what this package's own choices give, in arithmetic that is exact on every machine.
GOLDEN: dict[int, dict[str, Any]] = {
    3: {
        "order of samples": "a614c1b2d7225264",
        "seeds": [5240095042345710495, 4243738281665471608, 1453955333775046661],
        "tree": "254e992b3923f56e",
        "clip": "0e198de93eb45f2c",
        "norm": "1f451fa54efd31fb",
        "judged": "3f710ac088db3336",
        "schedule": [0.2, 0.8, 1.0, 0.882842712475, 0.27639320225, 0.2],
        "first weights": [
            -0.018108,
            -0.006201,
            -0.018767,
            -0.038082,
            -0.008326,
            -0.022856,
            0.001016,
            0.003368,
            -0.000207,
            0,
            1,
        ],
    },
}


def hash_of(*tensors: Tensor) -> str:
    return sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def tree() -> str:
    """Of 13 values whose sum depends on the order; each single addition is rounded alike everywhere."""
    draws = torch.randint(-(2**23), 2**23, (13, 64), generator=torch.Generator().manual_seed(1)).float()
    scales = torch.tensor([2.0 ** (5 * m % 17 - 30) for m in range(13)])
    return hash_of(tree_sum_of(list(draws * scales[:, None])))


def clip() -> str:
    """Of gradients of the norms 5 and 12, together 13."""
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2, 2)), "b": nn.Parameter(torch.zeros(3))})
    model["a"].grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    model["b"].grad = torch.tensor([0.0, 12.0, 0.0])
    config = Optimizer(clip_norm=0.7, reference_batch=64)
    update = update_of(model, config, Schedule(decay_steps=1000), tokens_per_microbatch=3)
    sums = sums_of(update)
    norm = update(0, torch.zeros(1), torch.tensor(7.0), sums)
    places = [update.slots[name] for name in sorted(update.slots)]
    return hash_of(norm, *(update.buckets[i].view(sums[i], slot) for i, slot in places))


def norm() -> str:
    """Of a gradient of several chunks: their sums, and the norm."""
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(10_000)), "b": nn.Parameter(torch.zeros(7))})
    draws = torch.randint(-(2**23), 2**23, (10_007,), generator=torch.Generator().manual_seed(2)).float()
    model["a"].grad, model["b"].grad = draws[:-7], draws[-7:]
    update = update_of(model, Optimizer(), Schedule())
    sums = sums_of(update)
    return hash_of(*map(sums_of_squares, sums), update.norm(sums))


def judged() -> str:
    """The loss that the guard judges and remembers, of seven microbatches whose sum depends on the order."""
    losses = torch.tensor([1e16, 1.0, -1e16, 3.0, 1e16, 1.0, -1e16], dtype=torch.float64)
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2))})
    model["a"].grad = torch.ones(2)
    update = update_of(model, Optimizer(), Schedule(), health=Health(spike_sigma=3))
    update(0, losses, torch.tensor(2.0, dtype=torch.float64), sums_of(update))
    figures = StepStats(losses, torch.tensor(2.0, dtype=torch.float64), torch.zeros(5), torch.zeros(1, 2))
    assert update.guard.losses[0].item() == figures.mean_loss() != losses.sum().item() / 2
    return hash_of(update.guard.losses[:1])


def first_weights() -> list[float]:
    """Some of a small GPT's, rounded: the draws are alike everywhere, their last bits are not."""
    weights = build(configured("model=gpt-nano", "model.block_size=16", "seed=3"), 50).state_dict()
    block = "transformer.h.1"
    names = ("transformer.wte.weight", "transformer.wpe.weight", f"{block}.mlp.c_proj.weight")
    found = [round(x, 6) for name in names for x in weights[name].flatten()[[0, 1, -1]].tolist()]
    return [
        *found,
        weights[f"{block}.mlp.c_proj.bias"].abs().max().item(),
        weights[f"{block}.ln_1.weight"].min().item(),
    ]


def test_what_this_package_chooses_itself_is_the_same_as_ever_or_numerics_is_raised() -> None:
    plan = BatchPlan(samples=1003, seed=7, global_size=48, micro_size=4)
    cosine = Schedule(kind="cosine", warmup_steps=4, decay_steps=24, min_ratio=0.2)
    found = {
        "order of samples": hash_of(*(torch.from_numpy(plan.sample_ids(step)) for step in (0, 1, 20, 21, 1000))),
        "seeds": [plan.dropout_seed(3, 1), derive("evaluation", 7, 3, 1), derive("weights", 7)],
        "tree": tree(),
        "clip": clip(),
        "norm": norm(),
        "judged": judged(),
        "schedule": [round(schedule_factor(cosine, step), 12) for step in (0, 3, 4, 9, 20, 30)],
        "first weights": pytest.approx(first_weights(), abs=2e-6),
    }
    assert found == GOLDEN[NUMERICS], RAISE


def test_the_fingerprint_records_what_bits_depend_on() -> None:
    found = fingerprint(configured("data=gpt2", "data.path=x"), CPU, "data")
    assert (found["mingpt"], found["probe"], found["cpu"]) == (NUMERICS, probe(CPU), cpu_vendor())
    assert found["tokenizers"].keys() == {"tokenizers"}
    assert found["own"] is None
    own = "optimizer._target_=examples.own_optimizer.Lion", "schedule._target_=examples.own_schedule.one_minus_sqrt"
    found = fingerprint(configured("experiment=classifier", *own), CPU, "data")
    assert (len(found["code"]), found["optimizer"], sorted(found["own"])) == (64, "own", ["optimizer", "schedule"])


def test_what_the_other_did_not_record_is_no_change() -> None:
    old: dict[str, Any] = {"torch": "1", "gone": 3, "init_from": None}
    assert changes(old, {"torch": "1", "probe": "a", "triton": None, "init_from": None}) == ([], ["probe"])
    assert changes(old, {"torch": "2", "init_from": None}) == (["torch: 1 -> 2"], [])


def test_the_code_of_a_model_is_what_it_imports_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of it is imported, which would run it."""
    for name, text in {
        "nets/__init__.py": "",
        "nets/net.py": "import math, torch\nfrom . import layers\nfrom .deep.inner import x\nimport blocks\n",
        "nets/layers.py": "def f():\n    from nets.lazy import g\n",
        "nets/lazy.py": "from nets import net\n",
        "nets/deep/__init__.py": "from ..up import y\n",
        "nets/deep/inner.py": "x = 1\n",
        "nets/up.py": "y = 1\n",
        "nets/other.py": "z = 1\n",
        "blocks.py": "import site_thing\n",
        "venv/site-packages/site_thing.py": "",
        "alone.py": "import json\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "venv/site-packages"))
    not_counted = []
    for path in sorted(tmp_path.rglob("*.py")):
        before = imported_sha256("nets.net.Net")
        path.write_text(path.read_text() + "a = 2\n")
        not_counted += [path.name] if imported_sha256("nets.net.Net") == before else []
    assert not_counted == ["alone.py", "net.py", "other.py", "site_thing.py"]  # net.py is the model's own: `code`
    for target in ("alone.Net", "site_thing.Net", "torch.nn.Linear", "mingpt.model.gpt2.GPT", "no.such.Net"):
        assert imported_sha256(target) is None, target
    assert not sys.modules.keys() & {"nets", "blocks", "alone"}
