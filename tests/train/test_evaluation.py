"""mingpt.train.evaluation: each target and each question once, and the same figures whatever the world."""

import math
import sys
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from torch import Tensor, nn

from bpe_kit import small, write_tokenizer
from config_kit import configured
from mingpt.commands import evaluate as evaluator
from mingpt.compute.tree import tree_sum_of
from mingpt.config.stored import evaluation_config
from mingpt.data.bpe import HuggingFaceTokens
from mingpt.data.mixture import MixedSplit
from mingpt.data.source import EvalSplit
from mingpt.data.text import TextData
from mingpt.data.vocabulary import Bytes, Characters, Spelling
from mingpt.errors import CRASHED, UserError
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.language import IGNORE
from mingpt.observe.events import Evaluating
from mingpt.train.evaluation import Figures, count_answers, evaluate, first_microbatches
from mingpt.world.lifetime import Lifetime
from mingpt.world.world import World, share
from snapshot_kit import ALONE

STRANGERS = (
    "/etc/passwd", "~/.ssh/id_ed25519", "data/../../secret.txt", "..\\secret.txt", "file:///etc/passwd",
    "http://169.254.169.254/latest/meta-data/iam/", "reference::data:application/json;base64,e30=",
    "data:application/json;base64,e30=", "filecache::s3://bucket/x", "s3://bucket/x::http://host/",
    "github://org:repo@main/x", "memory://x", "S3://bucket/x", "x\nfinished: step 2000", "x\0",
)  # fmt: skip
PLAIN = ("x", "data/a b..txt", "s3://bucket/x", "gs://b/x", "az://c/x", "abfs://c/x")
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


def measured(
    model: nn.Module, data: EvalSplit, answer_length: int = 0, world: World = ALONE, **options: Any
) -> Figures:
    return evaluate(model, data, world, nullcontext(), answer_length, **{"seed": 1, "step": 2} | options)


def in_worlds_of(size: int, model: nn.Module, data: EvalSplit, answers: int = 0, most: int = 0) -> Figures:
    world = Pretended(0, size, 0, torch.device("cpu"), "gloo")
    for rank in sorted(range(size), key=lambda rank: not share(rank, size, most or len(data))):  # the last hears all
        whole = [data[i] for i in range(len(data))]  # no mixture: of that, the first ones hear too little
        measured(model, whole, answers, replace(world, rank=rank), most=most)
    return measured(model, data, answers, replace(world, rank=rank), most=most)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_figures_are_the_same_in_any_world(model: GPT, weighted: bool) -> None:
    data = split(7, weighted)
    alone, beginning = measured(model, data, 2), measured(model, data[:4], 2)
    assert alone.questions == 7 * 3 - 1
    with torch.no_grad():
        forward = [model(*tensors) for tensors in data]
    assert alone.loss == tree_sum_of([loss.item() for loss, _ in forward]) / sum(count.item() for _, count in forward)
    events = list[Evaluating]()
    without = measured(model, data, publish=events.append)
    assert [(event.step, event.share) for event in events] == [(2, n / 7) for n in range(1, 8)]
    assert (without.loss, without.accuracy, without.questions) == (alone.loss, None, 0)
    for size in (2, 3, 7, 9):
        assert in_worlds_of(size, model, data, 2) == alone
    for size in (1, 2, 3):
        assert in_worlds_of(size, model, split(7, weighted), 2, most=4) == beginning


@pytest.mark.parametrize("size", [2, 3, 9])
def test_a_mixture_has_the_figures_of_each_component_in_any_world(model: GPT, size: int) -> None:
    """And as a whole those of all targets, each of which counts once."""
    own = {"data.mix.code": split(2), "data.mix.none": [], "data.mix.web": split(5)}
    mixed = MixedSplit({key: (TextData(), part) for key, part in own.items()})
    alone = measured(model, mixed)
    assert in_worlds_of(size, model, mixed) == alone
    assert alone.parts == {name: measured(model, own[f"data.mix.{name}"]) for name in ("code", "web")}
    assert replace(alone, parts={}) == measured(model, split(2) + split(5))
    assert evaluator.as_dict(alone)["parts"]["web"]["loss"] == alone.parts["web"].loss


def test_the_beginning_of_a_mixture_is_that_of_each_component() -> None:
    parts = {"data.mix.code": split(2), "data.mix.none": [], "data.mix.web": split(8)}
    mixed = MixedSplit({key: (TextData(), part) for key, part in parts.items()})
    assert [first_microbatches(mixed, most) for most in (1, 5)] == [[0, 2], [0, 2, 3, 4, 5]]
    assert [first_microbatches(mixed, most) for most in (0, 9, 11)] == [[*range(10)]] * 3


@pytest.mark.parametrize(
    ("overrides", "most"),
    [
        ("", 333),  # 1000 steps of 4 microbatches, 4 evaluations: 4 * 333 / 3 is a ninth of 4000
        ("train.eval_every=0", 1333),
        ("train.eval_every=999", 666),  # the second one is at the end
        ("train.max_steps=1", 1),
        ("train.max_steps=1 batch.micro_size=1", 21),
        ("batch.per_process_size=128", 666),
        ("train.eval_batches=0", 0),
    ],
)
def test_evaluation_takes_a_tenth_of_the_time_unless_the_config_says_otherwise(overrides: str, most: int) -> None:
    config = configured(*overrides.split())
    assert config.train.most_eval_batches(config.batch) == most


@pytest.mark.parametrize(("length", "right"), [(1, 3), (2, 3), (3, 2)])
def test_a_sample_is_right_if_all_of_its_answer_is_the_likeliest(length: int, right: int) -> None:
    logits = torch.eye(4)[torch.tensor([1, 2, 3]).expand(5, -1)]
    # right; its first token is wrong; right in all that counts; its last one is wrong; no question
    targets = torch.tensor([[1, 2, 3], [0, 2, 3], [IGNORE, IGNORE, 3], [1, 2, 1], [IGNORE] * 3])
    assert [int(x) for x in count_answers(logits, targets, length)] == [right, 4]


def test_the_padding_of_the_vocabulary_is_never_the_answer(model: GPT) -> None:
    """Untrained padding rows may well have the largest of the raw logits."""
    padded = deepcopy(model).eval()
    tokens = torch.randint(5, (64, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        padded.transformer.wte.weight[5:] *= 100
        assert (padded.padded_logits(padded.transformer(tokens)).argmax(-1) >= 5).any()
        assert (padded.loss_and_logits(tokens, tokens)[2].argmax(-1) < 5).all()


class Own(nn.Module):
    """A model of one's own that keeps the small protocol only, and draws random numbers, as a denoiser does."""

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return tokens.sum() * torch.rand(()), (targets != IGNORE).sum().float()


def test_a_model_draws_the_same_numbers_for_a_microbatch_of_a_step_in_any_world() -> None:
    data = split(7)
    torch.manual_seed(5)
    alone = measured(Own(), data, 2)
    assert (alone.targets, alone.accuracy) == (120, None)  # no logits, no answers
    for size in (2, 3):
        assert in_worlds_of(size, Own(), data) == alone
    others = [measured(Own(), data, seed=seed, step=step) for seed, step in ((1, 3), (2, 2))]
    assert len({figures.loss for figures in (alone, *others)}) == 3
    tokens, targets = data[0]
    nothing = measured(Own(), [(tokens, torch.full_like(targets, IGNORE))])
    assert (math.isnan(nothing.loss), nothing.targets) == (True, 0)


class Told(nn.Module):
    """Its loss is what the data say."""

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return tokens.sum(), torch.ones(())


def test_losses_are_added_along_the_tree() -> None:
    data = [(torch.tensor([[x]]), torch.zeros(1, 1)) for x in (1e20, 1.0, -1e20, 1.0)]
    assert measured(Told(), data).loss == 0  # from left to right it would be a quarter


def stored(**sections: Any) -> dict[str, Any]:
    return {"model": {"n_layer": 1}, "data": {"kind": "text", "path": "x"}, "batch": {"micro_size": 4}} | sections


def evaluated(before: dict[str, Any], *arguments: str) -> dict[str, Any]:
    return evaluation_config(before, "run", arguments, 1).model_dump()


def test_the_stored_config_stands_where_the_command_line_says_nothing() -> None:
    before = stored(precision="bf16", train={"threads": 3, "max_steps": 7}, world={"device": "cuda"}, seed=9)
    config = evaluated(before, "data.val_fraction=0.5", "world.device=cpu", "batch.micro_size=2", "data.tokens=byte")
    assert (config["model"]["n_layer"], config["precision"], config["train"]["threads"]) == (1, "bf16", 3)
    assert (config["data"]["path"], config["data"]["val_fraction"], config["world"]["device"]) == ("x", 0.5, "cpu")
    assert (config["batch"]["micro_size"], config["data"]["tokens"]) == (2, "byte")


@pytest.mark.parametrize("argument", ["", "data.workers=1", "data=random"])
@pytest.mark.parametrize(("section", "kind"), [("data", "own"), ("data", "text"), ("model", "gpt"), ("model", ["own"])])
def test_no_code_is_imported_because_a_snapshot_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, kind: object, argument: str
) -> None:
    (tmp_path / "dangerous.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = stored(**{section: {"kind": kind, "path": "x", "_target_": "dangerous.data"}})
    with suppress(UserError):
        evaluated(before, *argument.split())
    assert "dangerous" not in sys.modules


def test_code_of_ones_own_that_ends_the_process_has_evaluated_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def quits(*_: object) -> None:
        raise SystemExit(0)

    monkeypatch.setattr(evaluator, "find_manifest", quits)  # in place of data=own, which is called later
    assert evaluator.command(["x"], Lifetime()) == CRASHED


def test_tokens_know_the_bytes_of_the_text_that_they_stand_for(tmp_path: Path) -> None:
    """Also as SentencePiece's: a space is a letter, and a character without a token is told byte by byte."""
    text = "the king is 漢 é king\nagain"
    vocab = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *"▁aeghiknost"]
    spm = Tokenizer(models.BPE({t: i for i, t in enumerate(vocab)}, [], byte_fallback=True, unk_token="<unk>"))
    spm.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    spm.normalizer = normalizers.Replace(" ", "▁")
    others = (Characters("".join(sorted(set(text)))), Bytes(), HuggingFaceTokens(spm.to_str()))
    for vocabulary in (small(), HuggingFaceTokens(write_tokenizer(tmp_path).read_text()), *others):
        assert isinstance(vocabulary, Spelling)
        lengths = vocabulary.byte_lengths()
        for part in (text, " king", "漢"):
            assert sum(lengths[i] for i in vocabulary.encode(part)) == len(part.encode())
    assert small().byte_lengths()[small().end_of_text] == 0


def test_a_target_counts_as_many_bytes_as_its_weight_says(model: GPT) -> None:
    """What has no weight in the loss has none in the text; half a weight everywhere changes nothing."""
    tokens, targets = torch.randint(5, (2, 3, 6), generator=torch.Generator().manual_seed(1))
    lengths = [0, 1, 2, 3, 10]
    some = targets <= 2
    whole, half, ignored, weighted = (
        measured(model, [(tokens, *rest)], byte_lengths=lengths)
        for rest in (
            (targets,),
            (targets, torch.full((3, 6), 0.5)),
            (targets.masked_fill(~some, IGNORE),),
            (targets, some.float()),
        )
    )
    assert whole.spelled == sum(lengths[i] for i in targets.flatten())
    assert whole.bits_per_byte == pytest.approx(whole.loss * 18 / math.log(2) / whole.spelled, rel=1e-12)
    assert weighted.spelled == ignored.spelled < whole.spelled
    assert weighted.bits_per_byte == pytest.approx(ignored.bits_per_byte, rel=1e-6)
    assert half.bits_per_byte == pytest.approx(whole.bits_per_byte, rel=1e-6)
    assert measured(model, [(tokens, targets)]).bits_per_byte is None


@pytest.mark.parametrize(("key", "place"), [*[("path", place) for place in STRANGERS], ("tokenizer", STRANGERS[0])])
def test_a_place_that_a_stranger_wrote_must_be_given_again(key: str, place: str) -> None:
    before = stored(data={"kind": "text", "path": "x", "tokens": "bpe", "tokenizer": "y", key: place})
    with pytest.raises(UserError, match=rf"^data\.{key} is ") as refused:
        evaluated(before)
    [problem] = refused.value.problems
    assert problem.isprintable()
    assert evaluated(before, f"data.{key}=/mine")["data"][key] == "/mine"


def test_a_plain_place_is_taken_from_a_snapshot() -> None:
    for path in PLAIN:
        assert evaluated(stored(data={"kind": "text", "path": path}))["data"]["path"] == path
    with pytest.raises(UserError, match="http://inside/"):
        evaluated(stored(data={"kind": "text", "path": "x", "urls": ["a", {"b": "http://inside/"}]}))


def test_what_costs_memory_and_processors_is_not_a_strangers_to_say() -> None:
    greedy = {"kind": "shards", "path": "x", "cache_bytes": 2**62, "workers": 1000, "cache_dir": "/etc"}
    kept = evaluated(stored(data=greedy))["data"]
    assert (kept["cache_bytes"], kept["workers"], kept["cache_dir"]) == (2**35, 0, "~/.cache/mingpt")
    many = stored(batch={"micro_size": 10**7}, train={"threads": 1024})
    with pytest.raises(UserError) as refused:
        evaluated(many)
    assert [problem.partition("=")[0] for problem in refused.value.problems] == ["batch.micro_size", "train.threads"]
    config = evaluated(many, "batch.micro_size=512", "train.threads=65")
    assert (config["batch"]["micro_size"], config["train"]["threads"]) == (512, 65)
