"""train.cuda_graphs: a microbatch that is replayed has the bits of one that is computed.

With a stand-in on a CPU, which records the operations of a microbatch (graph_kit). What CUDA itself does with them is
tried by benchmarks/gpu_check.sh.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mingpt.errors import STOPPED
from mingpt.replay.replaying import replay
from mingpt.train.attempt import attempt
from tests.kits.graph_kit import COPY, Recorded, Refused, graphs_on_cpu
from tests.kits.own_kit import Linear
from tests.kits.poison_kit import GUARDED, POISONED, poison
from tests.kits.replay_kit import Asked, data_of, settings_of, train_here
from tests.kits.verb_kit import store, verified

GRAPH, OFF = "train.cuda_graphs: a microbatch is one CUDA graph\n", "train.cuda_graphs=false"
ROWS = ("~model", "data._target_=examples.classifier.rows", "data.count=300", "batch.micro_size=1")


OWN = (*ROWS, "train.cuda_graphs=true")


def digest(run_dir: str) -> str:
    return verified(run_dir, store(run_dir).steps()[0]).digest


Tried = Callable[..., type[Recorded]]


@pytest.fixture
def tried(tmp_path: Path, text: Path, cache: Path) -> Tried:
    def trained(*settings: str, recorder: type[Recorded] = Recorded) -> type[Recorded]:
        """Without graphs, in the folder `computed`, and with them, in `tried`: the bits are the same."""
        places = () if "~model" in settings else (f"data.path={text}", f"data.cache_dir={cache}")
        train_here(f"{tmp_path}/computed", *places, *settings, OFF)
        with graphs_on_cpu(recorder) as used:
            train_here(f"{tmp_path}/tried", *places, *settings)
        assert digest(f"{tmp_path}/tried") == digest(f"{tmp_path}/computed")
        return used

    return trained


RUNS: dict[str, tuple[tuple[str, ...], int, int]] = {  # settings; microbatches in three steps; graphs
    "plain": ((), 12, 1),
    "one a step": (("batch.global_size=2",), 3, 1),
    "fp16": (("precision=fp16",), 12, 1),
    "bf16 and Muon": (("model=modern-nano", "~model.dropout", "precision=bf16", "optimizer=muon"), 12, 1),
    "recomputed": (("train.recompute=block", "model.dropout=0"), 12, 1),
    "loss rows": (("train.loss_rows=5",), 12, 1),
    "a batch that grows": (("batch.global_size=16", "batch.micro_size=4", "batch.double_at=[1,2]"), 12, 3),
    "frozen": (("train.freeze=[transformer.wte.*,'transformer.h.[0].*']",), 12, 1),
}


@pytest.mark.parametrize("kind", RUNS)
def test_replayed_microbatches_have_the_same_bits(kind: str, tried: Tried, capsys: pytest.CaptureFixture[str]) -> None:
    settings, microbatches, graphs = RUNS[kind]
    assert tried(*settings, "train.max_steps=3").replays == microbatches + graphs  # one checks each capture
    assert capsys.readouterr().out.count(GRAPH) == graphs


@pytest.mark.parametrize("kind", ["documents apart", "chat"])
def test_masks_and_weights_are_inputs_too(kind: str, tmp_path: Path, tried: Tried) -> None:
    how, places = data_of(kind, tmp_path / "data")
    assert tried(*how, *places, "train.max_steps=3").replays == 3 * 4 + 1


def test_evaluation_between_steps_a_stop_and_a_resume(tmp_path: Path, text: Path, cache: Path, tried: Tried) -> None:
    run = (f"data.path={text}", f"data.cache_dir={cache}", "train.eval_every=2", "train.max_steps=6")
    with graphs_on_cpu():
        assert attempt(settings_of(f"{tmp_path}/tried", *run), Asked(3)) == STOPPED
    tried(*run)


def test_a_replay_of_a_past_step_needs_no_graph(tmp_path: Path, text: Path, cache: Path) -> None:
    run = (f"data.path={text}", f"data.cache_dir={cache}", "train.max_steps=6")
    with graphs_on_cpu():
        train_here(f"{tmp_path}/run", *run)
    with replay(f"{tmp_path}/run", 2, [f"data.path={text}"]) as past:
        assert [past.advance().same for _ in range(3)] == [True] * 3


def test_a_run_that_goes_back_reads_its_weights_where_they_were(tmp_path: Path) -> None:
    run = ("~model", *POISONED, *GUARDED, *poison([9, 10], 1e25), "train.max_steps=14")
    for name, how in (("computed", OFF), ("replayed", "train.cuda_graphs=true")):
        with graphs_on_cpu() as recorder:
            # The model makes its count anew on the host, which is a constant, and may be.
            assert any(attempt(settings_of(f"{tmp_path}/{name}", *run, how), Asked()) == 0 for _ in range(2))
        assert (recorder.replays > 0) == (name == "replayed")
    assert digest(f"{tmp_path}/replayed") == digest(f"{tmp_path}/computed")


class Waits(Linear):
    """Asks the device for a number."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x * (1.0 if x.sum().item() > 0 else 2.0), y)


class HostNoise(Linear):
    """Draws a number on the host, which a graph would keep for ever."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x * float(torch.randint(1, 100, ()).numpy()), y)


class Branches(Linear):
    """Uses a layer only now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.calls = nn.Linear(10, 2), 0

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls == 1:  # when it is tried out
            x = x + self.extra(x).sum() * 0
        return super().forward(x, y)


class WrongBits(Recorded):
    def replay(self) -> None:
        super().replay()
        last = [args for function, args, *_ in self.operations if function is COPY][-1]
        last[0][0].view(-1)[-1:].add_(2**-20)  # of one element of one gradient


class Short(Recorded):
    def free(self) -> float:
        return 1999.0


class ShortForTwo(Recorded):
    def warm_up(self, work: Callable[[], None]) -> int:
        return super().warm_up(work) * 10**6

    def free(self) -> float:
        return 3e9


@pytest.mark.parametrize(("processes", "graphs"), [("1", 1), ("2", 0)])
def test_processes_that_share_a_gpu_share_its_free_memory(
    processes: str,
    graphs: int,
    tmp_path: Path,
    text: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They ask at the same time, and each one would have taken it all."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    run = (f"data.path={text}", f"data.cache_dir={cache}", "world.device=cpu", "train.max_steps=1")
    with graphs_on_cpu(ShortForTwo):
        train_here(f"{tmp_path}/run", *run)
    assert capsys.readouterr().out.count(GRAPH) == graphs


REFUSALS: dict[str, tuple[tuple[str, ...], type[Recorded], str]] = {
    "no capture": ((), Refused, "a microbatch is computed without a graph: operation not permitted when stream is cap"),
    "other bits": ((), WrongBits, "a microbatch is computed without a graph: a replay of it has other bits"),
    "no memory": ((), Short, "a microbatch is computed without a graph: it would keep 0.0 GB of this GPU"),
    "fast": (("reduce=fast",), Recorded, "microbatches are computed without a graph: reduce=fast adds microbatches up"),
    "dropout again": (
        ("train.recompute=block",),
        Recorded,
        "microbatches are computed without a graph: train.recompute",
    ),
    "a model of one's own, unasked": (
        (*ROWS, "model._target_=tests.kits.own_kit.Linear"),
        Recorded,
        "microbatches are computed without a graph: auto leaves a model of your own without",
    ),
    "a model of one's own": (
        (*OWN, "model._target_=tests.kits.own_kit.Linear"),
        Recorded,
        "a microbatch is one CUDA graph",
    ),
    "it waits": (
        (*OWN, "model._target_=test_graphs.Waits"),
        Recorded,
        "a microbatch is computed without a graph: called a synchronizing operation",
    ),
    "it draws on the host": (
        (*OWN, "model._target_=test_graphs.HostNoise"),
        Recorded,
        "a microbatch is computed without a graph: a replay of it has other bits",
    ),
    "it leaves out a layer": (
        (*OWN, "model._target_=test_graphs.Branches"),
        Recorded,
        "a microbatch is computed without a graph: a microbatch has no gradient of extra",
    ),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_cannot_be_captured_is_computed_and_a_line_says_why(
    kind: str, tried: Tried, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, recorder, line = REFUSALS[kind]
    replays = tried(*settings, "train.max_steps=2", recorder=recorder).replays
    assert min(replays, 2) == ("other bits" in line) + 2 * ("one CUDA graph" in line)
    assert capsys.readouterr().out.count(f"train.cuda_graphs: {line}") == 1


def test_a_cpu_has_no_graphs_and_says_so_only_if_asked_for(
    tmp_path: Path, text: Path, cache: Path, capsys: pytest.CaptureFixture[Any]
) -> None:
    run = (f"data.path={text}", f"data.cache_dir={cache}", "train.max_steps=1")
    train_here(f"{tmp_path}/auto", *run)
    assert "cuda_graphs" not in capsys.readouterr().out
    train_here(f"{tmp_path}/true", *run, "train.cuda_graphs=true")
    out = capsys.readouterr().out
    assert (
        out.count("train.cuda_graphs: microbatches are computed without a graph: this process computes on cpu\n") == 1
    )
