"""mingpt.train.evaluation: each target and each question once, and the same figures whatever the world."""

import math
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn

from mingpt.commands import evaluate as evaluator
from mingpt.compose.stored import evaluation_config
from mingpt.config.datasets import TextData
from mingpt.config.schema import Train
from mingpt.data.bpe import HuggingFaceTokens
from mingpt.data.mixed import MixedSplit
from mingpt.data.opening import open_data
from mingpt.data.source import EvalSplit, Spelling
from mingpt.data.vocabulary import Bytes, Characters
from mingpt.errors import UserError
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.language import IGNORE
from mingpt.observe.events import Evaluating
from mingpt.train import evaluation
from mingpt.train.evaluation import EvalResult, evaluate, evaluated_part
from mingpt.world.world import World, share
from tests.kits.bpe_kit import small, write_tokenizer
from tests.kits.config_kit import configured
from tests.kits.snapshot_kit import ALONE

CONFIG = GPTConfig(vocab_size=5, block_size=6, n_layer=1, n_head=2, n_embd=8, vocab_multiple=8)


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.4)
    return model


def split(microbatches: int, weighted: bool = False) -> list[tuple[Tensor, ...]]:
    """Microbatches of three samples; the last sample of all is filled up."""
    drawn = torch.Generator().manual_seed(1)
    out: list[tuple[Tensor, ...]] = []
    for i in range(microbatches):
        tokens, targets = torch.randint(5, (2, 3, 6), generator=drawn)
        if i == microbatches - 1:
            targets[2] = IGNORE
        out.append((tokens, targets, torch.rand(3, 6, generator=drawn)) if weighted else (tokens, targets))
    return out


@dataclass(frozen=True)
class Pretended(World):
    """One process of a larger world, whose messages are passed on by hand."""

    said: dict[int, Any] = field(default_factory=dict)

    def gather(self, value: Any) -> list[Any]:
        self.said[self.rank] = value
        return [self.said[rank] for rank in sorted(self.said)]


def measured(model: nn.Module, data: EvalSplit, world: World = ALONE, **options: Any) -> EvalResult:
    return evaluate(model, data, world, nullcontext(), **{"seed": 1, "step": 2} | options)


def in_worlds_of(size: int, model: nn.Module, data: EvalSplit) -> EvalResult:
    world = Pretended(0, size, 0, torch.device("cpu"), "gloo")
    for rank in sorted(range(size), key=lambda rank: not share(rank, size, len(data))):  # the last hears all
        whole = [data[i] for i in range(len(data))]  # no mixture: of that, the first ones hear too little
        measured(model, whole, replace(world, rank=rank))
    return measured(model, data, replace(world, rank=rank))


@pytest.mark.parametrize("weighted", [False, True])
def test_the_figures_are_the_same_in_any_world(model: GPT, weighted: bool) -> None:
    data = split(7, weighted)
    events = list[Evaluating]()
    alone, part = measured(model, data, publish=events.append), evaluated_part(data, 4)
    assert [(event.step, event.share) for event in events] == [(2, n / 7) for n in range(1, 8)]
    with torch.no_grad():
        losses, counts = map(list, zip(*(model(*tensors) for tensors in data), strict=True))
    assert alone.loss == pytest.approx(float(sum(losses) / sum(counts)), rel=1e-6)
    assert (alone.accuracy, alone.questions) == (None, 0)  # it has logits, but its targets are no labels
    for size in (2, 3, 7, 9):
        assert in_worlds_of(size, model, data) == alone
    for size in (1, 2, 3):
        assert in_worlds_of(size, model, part) == measured(model, [data[i] for i in (0, 1, 3, 5)])


@pytest.mark.parametrize("size", [2, 3, 9])
def test_a_mixture_has_the_figures_of_each_component_in_any_world(model: GPT, size: int) -> None:
    """And as a whole those of all targets, each of which counts once; a part of it has a share of each component."""
    own = {"code": split(2), "none": [], "web": split(5)}
    mixed = MixedSplit({f"data.mix.{name}": (TextData(), part) for name, part in own.items()})
    alone = measured(model, mixed)
    assert in_worlds_of(size, model, mixed) == alone
    assert alone.parts == {name: measured(model, own[name]) for name in ("code", "web")}
    assert replace(alone, parts={}) == measured(model, split(2) + split(5))
    assert evaluator.as_dict(alone)["parts"]["web"]["loss"] == alone.parts["web"].loss
    parts = [evaluated_part(mixed, batches) for batches in (1, 4, 0, 9)]
    assert [part.size for part in parts] == [2, 5, 7, 7]
    some = own["code"] + [own["web"][i] for i in (0, 1, 3)]
    assert replace(in_worlds_of(size, model, parts[1]), parts={}) == measured(model, some)


def targets_of(split: EvalSplit) -> list[int]:
    return [target for i in range(len(split)) for target in split[i][1].flatten().tolist() if target != IGNORE]


def test_without_the_key_an_evaluation_takes_the_same_targets_whatever_the_batch_and_the_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of the data alone, all over their validation split; the key counts microbatches, 0 is all."""
    monkeypatch.setattr(evaluation, "EVAL_TOKENS", 100)
    (tmp_path / "text").write_text("".join(chr(i) for i in range(0x4E00, 0x4E00 + 1200)))
    given = [f"data.path={tmp_path}/text", "data.val_fraction=0.5", f"data.cache_dir={tmp_path}/made"]
    found = []
    for more in (
        "batch.micro_size=1",
        "batch.micro_size=3 batch.global_size=6 train.max_steps=3",
        "batch.micro_size=8",
    ):
        config = configured(*given, "model.block_size=16", "model.n_head=4", *more.split())
        source = open_data(config.data, 16, config.batch.micro_size)
        found.append(targets_of(evaluated_part(source.validation, config.train.eval_batches)))
        for batches, whole in ((0, True), (10**6, True), (1, False)):
            part = evaluated_part(source.validation, batches)
            assert (targets_of(part) == targets_of(source.validation)) == whole
    assert found == [found[0]] * 3
    assert len(found[0]) == 96  # 6 samples of 16 targets
    assert {*found[0]} - {*targets_of(source.validation)[:400]}  # not its beginning alone


def test_the_help_says_what_an_evaluation_may_cost() -> None:
    assert f"null: {evaluation.EVAL_TOKENS} tokens at most" in (Train.model_fields["eval_batches"].description or "")


class Likeliest(nn.Module):
    """The likeliest class of a row is its number."""

    def loss_and_logits(self, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rows.sum(), (labels != IGNORE).sum(), torch.eye(4)[rows]


def test_a_sample_is_right_if_its_label_is_the_likeliest_class_in_any_world() -> None:
    """One without a label is no question."""
    rows = torch.tensor([[0, 1, 2], [3, 2, 1]])
    data = [*zip(rows, torch.tensor([[0, 2, 2], [IGNORE, IGNORE, 1]]), strict=True)]
    alone = measured(Likeliest(), data)
    assert (alone.right, alone.questions, alone.accuracy) == (3, 4, 0.75)
    assert in_worlds_of(2, Likeliest(), data) == alone


def test_losses_are_added_along_the_tree() -> None:
    rows = [(x, 1, 0, 0, 0) for x in (1e20, 1.0, -1e20, 1.0)]
    assert evaluation.summed(rows).loss == 0  # from left to right it would be a quarter


def test_tokens_know_the_bytes_of_the_text_that_they_stand_for(tmp_path: Path) -> None:
    """Of SentencePiece's tokenizers nobody knows."""
    text = "the king is 漢 é king\nagain"
    spm = Tokenizer(models.BPE({"▁": 0}, []))
    spm.decoder = decoders.Fuse()
    assert HuggingFaceTokens(spm.to_str()).byte_lengths() == []
    others = (Characters("".join(sorted(set(text)))), Bytes())
    for vocabulary in (small(), HuggingFaceTokens(write_tokenizer(tmp_path).read_text()), *others):
        assert isinstance(vocabulary, Spelling)
        lengths = vocabulary.byte_lengths()
        for part in (text, " king", "漢"):
            assert sum(lengths[i] for i in vocabulary.encode(part)) == len(part.encode())
    assert small().byte_lengths()[small().end_of_text] == 0


def test_a_target_counts_as_many_bytes_as_its_weight_says(model: GPT) -> None:
    """What has no weight in the loss has none in the text; half a weight everywhere changes nothing."""
    tokens, targets = torch.randint(5, (2, 3, 6), generator=torch.Generator().manual_seed(1))
    targets[0] = IGNORE
    lengths = [0, 1, 2, 3, 10]
    whole, half = (
        measured(model, [(tokens, targets, torch.full((3, 6), w))], byte_lengths=lengths) for w in (1.0, 0.5)
    )
    spelled = sum(lengths[i] for i in targets[1:].flatten())
    assert (whole.spelled, half.spelled) == (spelled, spelled / 2)
    expected = whole.loss * 12 / math.log(2) / spelled
    assert [whole.bits_per_byte, half.bits_per_byte] == pytest.approx([expected] * 2, rel=1e-6)
    assert measured(model, [(tokens, targets)]).bits_per_byte is None


# --- what is taken of a config that a stranger may have written ---


def evaluated(*arguments: str, **sections: Any) -> dict[str, Any]:
    """What an evaluation makes of a stored config with these sections."""
    stored = {"model": {"n_layer": 1}, "data": {"kind": "text", "path": "x"}, "batch": {"micro_size": 4}} | sections
    return evaluation_config(stored, "run", arguments, 1).model_dump()


@pytest.mark.parametrize("argument", ["", "data=random"])
@pytest.mark.parametrize(("section", "kind"), [("data", "own"), ("data", "text"), ("model", "gpt"), ("model", ["own"])])
def test_no_code_is_imported_because_a_snapshot_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, kind: object, argument: str
) -> None:
    (tmp_path / "dangerous.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with suppress(UserError):
        evaluated(*argument.split(), **{section: {"kind": kind, "path": "x", "_target_": "dangerous.data"}})
    assert "dangerous" not in sys.modules


@pytest.mark.parametrize(
    "place",
    [
        "/etc/passwd", "~/.ssh/id_ed25519", "data/../../secret.txt", "file:///etc/passwd",
        "http://169.254.169.254/latest/meta-data/iam/", "filecache::s3://bucket/x", "x\nfinished: step 2000",
    ],
)  # fmt: skip
def test_a_place_that_a_stranger_wrote_must_be_given_again(place: str) -> None:
    data = {"kind": "text", "path": place, "tokens": "bpe", "tokenizer": place}
    with pytest.raises(UserError) as refused:
        evaluated(data=data | {"urls": ["a", {"b": place}]})
    assert [problem.partition(" is ")[0] for problem in refused.value.problems] == [
        "data.path", "data.tokenizer", "data.urls"
    ]  # fmt: skip
    assert "".join(refused.value.problems).isprintable()
    kept = evaluated("data.path=/mine", "data.tokenizer=/my", data=data)["data"]
    assert (kept["path"], kept["tokenizer"]) == ("/mine", "/my")


@pytest.mark.parametrize("place", ["data/a b..txt", "s3://bucket/x"])
def test_a_plain_place_is_taken_from_a_snapshot(place: str) -> None:
    assert evaluated(data={"kind": "text", "path": place})["data"]["path"] == place


def test_what_costs_memory_and_processors_is_not_a_strangers_to_say() -> None:
    greedy = {"kind": "shards", "path": "x", "cache_bytes": 2**62, "workers": 1000, "cache_dir": "/etc"}
    kept = evaluated(data=greedy)["data"]
    assert (kept["cache_bytes"], kept["workers"], kept["cache_dir"]) == (2**35, 0, "~/.cache/mingpt")
    many = {"batch": {"micro_size": 10**7}, "train": {"threads": 1024}}
    with pytest.raises(UserError) as refused:
        evaluated(**many)
    assert [problem.partition("=")[0] for problem in refused.value.problems] == ["batch.micro_size", "train.threads"]
    assert evaluated("batch.micro_size=512", "train.threads=65", **many)["batch"]["micro_size"] == 512
