"""mingpt.train.evaluation: each target and each question once, and the same figures whatever the world."""

import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor, nn

from bpe_kit import small, write_tokenizer
from config_kit import configured
from mingpt.commands import evaluate as evaluator
from mingpt.compute.tree import tree_sum_of
from mingpt.config.stored import evaluation_config
from mingpt.data.bpe import HuggingFaceTokens
from mingpt.data.kinds.text import TextData
from mingpt.data.mixture import MixedSplit
from mingpt.data.source import EvalSplit
from mingpt.data.vocabulary import Bytes, Characters, Spelling
from mingpt.errors import UserError
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.language import IGNORE
from mingpt.observe.events import Evaluating
from mingpt.train.evaluation import Figures, count_answers, evaluate, first_microbatches
from mingpt.world.lifetime import Lifetime
from mingpt.world.world import World, share
from snapshot_kit import ALONE

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


def in_worlds_of(size: int, model: nn.Module, data: EvalSplit, answer_length: int, most: int = 0) -> Figures:
    world = Pretended(0, size, 0, torch.device("cpu"), "gloo")
    for rank in sorted(
        range(size), key=lambda rank: not share(rank, size, most or len(data))
    ):  # the last one has heard all
        whole = [data[i] for i in range(len(data))]  # no mixture: of that, the first ones hear too little
        evaluate(model, whole, replace(world, rank=rank), nullcontext(), answer_length, seed=1, step=2, most=most)
    return evaluate(model, data, replace(world, rank=rank), nullcontext(), answer_length, seed=1, step=2, most=most)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [2, 3, 7, 9])
def test_the_figures_are_the_same_in_any_world(model: GPT, size: int, weighted: bool) -> None:
    data = split(7, weighted)
    alone = evaluate(model, data, ALONE, nullcontext(), 2, seed=1, step=2)
    assert in_worlds_of(size, model, data, 2) == alone
    assert alone.questions == 7 * 3 - 1


@pytest.mark.parametrize("size", [2, 3, 9])
def test_a_mixture_has_the_figures_of_each_component_in_any_world(model: GPT, size: int) -> None:
    """And as a whole those of all targets, each of which counts once."""
    own = {"data.mix.code": split(2), "data.mix.none": [], "data.mix.web": split(5)}
    mixed = MixedSplit({key: (TextData(), part) for key, part in own.items()})
    alone = evaluate(model, mixed, ALONE, nullcontext(), seed=1, step=2)
    assert in_worlds_of(size, model, mixed, 0) == alone
    assert alone.parts == {
        name: evaluate(model, own[f"data.mix.{name}"], ALONE, nullcontext(), seed=1, step=2) for name in ("code", "web")
    }
    assert replace(alone, parts={}) == evaluate(model, split(2) + split(5), ALONE, nullcontext(), seed=1, step=2)
    assert evaluator.as_dict(alone)["parts"]["web"]["loss"] == alone.parts["web"].loss
    assert evaluator.as_text(alone).splitlines()[-1].startswith(f"of web         {alone.parts['web'].loss:.4f} nats")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_beginning_of_a_split_has_the_figures_of_that_beginning_in_any_world(model: GPT, size: int) -> None:
    beginning = evaluate(model, split(7)[:4], ALONE, nullcontext(), 2, seed=1, step=2)
    assert in_worlds_of(size, model, split(7), 2, most=4) == beginning
    shares, seconds = list[float](), list[float]()

    def note(event: Evaluating) -> None:
        assert event.step == 2
        shares.append(event.share)
        seconds.append(event.seconds)

    evaluate(model, split(7), ALONE, nullcontext(), seed=1, step=2, most=4, publish=note)
    assert shares == [0.25, 0.5, 0.75, 1]
    assert 0 < seconds[0] < seconds[-1]


def test_the_beginning_of_a_mixture_is_that_of_each_component() -> None:
    parts = {"data.mix.code": split(2), "data.mix.none": [], "data.mix.web": split(8)}
    mixed = MixedSplit({key: (TextData(), part) for key, part in parts.items()})
    chosen = {most: first_microbatches(mixed, most) for most in (0, 1, 5, 9, 10, 11)}
    everything = [*range(10)]
    assert chosen == {
        0: everything,
        1: [0, 2],
        5: [0, 2, 3, 4, 5],
        9: everything,
        10: everything,
        11: everything,
    }


@pytest.mark.parametrize(
    ("overrides", "most"),
    [
        ((), 333),  # 1000 steps of 4 microbatches, 4 evaluations: 4 * 333 / 3 is a ninth of 4000
        (("train.eval_every=0",), 1333),
        (("train.eval_every=999",), 666),  # the second one is at the end
        (("train.max_steps=1",), 1),
        (("train.max_steps=1", "batch.micro_size=1"), 21),
        (("batch.per_process_size=128",), 666),
        (("train.eval_batches=7",), 7),
        (("train.eval_batches=0",), 0),
    ],
)
def test_evaluation_takes_a_tenth_of_the_time_unless_the_config_says_otherwise(
    overrides: tuple[str, ...], most: int
) -> None:
    config = configured(*overrides)
    assert config.train.most_eval_batches(config.batch) == most


@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_is_that_of_forward_to_the_bit_with_questions_and_without(model: GPT, weighted: bool) -> None:
    data = split(3, weighted)
    with torch.no_grad():
        forward = [model(*tensors) for tensors in data]
    expected = tree_sum_of([loss.item() for loss, _ in forward]) / sum(count.item() for _, count in forward)
    without, asked = (evaluate(model, data, ALONE, nullcontext(), n, seed=1, step=2) for n in (0, 2))
    assert without.loss == asked.loss == expected
    assert without.accuracy is None
    assert (without.right, without.questions) == (0, 0)


@pytest.mark.parametrize("length", [1, 2, 6])
def test_a_sample_is_right_if_all_of_its_answer_is_the_likeliest(model: GPT, length: int) -> None:
    tokens = torch.randint(5, (200, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        likeliest = model.eval().logits(tokens).argmax(-1)
    targets = likeliest.clone()
    targets[:50, -length] += 1  # wrong in the first token of the answer
    targets[50:100, -1] += 1  # in the last one
    if length < 6:
        targets[100:150, 5 - length] += 1  # before the answer: does not matter
    figures = evaluate(model, [(tokens, targets % 5)], ALONE, nullcontext(), length, seed=1, step=2)
    assert (figures.right, figures.questions, figures.accuracy) == (100, 200, 0.5)


def test_what_is_ignored_is_neither_right_nor_wrong() -> None:
    logits = torch.eye(4)[torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])]
    targets = torch.tensor(
        [
            [0, 2, 3],  # right
            [0, IGNORE, 3],  # right in all that counts
            [0, IGNORE, 1],  # wrong
            [1, IGNORE, IGNORE],  # no question
        ]
    )
    assert [int(x) for x in count_answers(logits, targets, 2)] == [2, 3]


def test_the_padding_of_the_vocabulary_is_never_the_answer(model: GPT) -> None:
    """Untrained padding rows may well have the largest of the raw logits."""
    padded = GPT(CONFIG)
    padded.load_state_dict(model.state_dict())
    tokens = torch.randint(5, (64, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        padded.transformer.wte.weight[5:] *= 100
        raw = padded.eval().padded_logits(padded.transformer(tokens)).argmax(-1)
        _, _, logits = padded.loss_and_logits(tokens, tokens)
    assert (raw >= 5).any()
    assert (logits.argmax(-1) < 5).all()


class Own(nn.Module):
    """A model of one's own that keeps the small protocol only."""

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return tokens.sum().float(), (targets != IGNORE).sum().float()


def test_a_model_without_logits_has_its_loss_alone() -> None:
    data = split(2)
    figures = evaluate(Own(), data, ALONE, nullcontext(), 2, seed=1, step=2)
    assert figures == Figures(sum(int(tokens.sum()) for tokens, _ in data) / 30, 30)
    assert figures.accuracy is None


class Noisy(Own):
    """Draws random numbers, as a denoiser does."""

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss, count = super().forward(tokens, targets)
        return loss * torch.rand(()), count


def test_a_model_draws_the_same_numbers_for_a_microbatch_of_a_step_in_any_world() -> None:
    data = split(7)
    torch.manual_seed(5)
    alone = evaluate(Noisy(), data, ALONE, nullcontext(), seed=1, step=2)
    for size in (2, 3):
        assert in_worlds_of(size, Noisy(), data, 0) == alone
    others = [evaluate(Noisy(), data, ALONE, nullcontext(), seed=seed, step=step) for seed, step in ((1, 3), (2, 2))]
    assert len({figures.loss for figures in (alone, *others)}) == 3


def test_without_a_target_that_counts_there_is_no_loss() -> None:
    tokens, targets = split(1)[0]
    figures = evaluate(Own(), [(tokens, torch.full_like(targets, IGNORE))], ALONE, nullcontext(), seed=1, step=2)
    assert math.isnan(figures.loss)
    assert figures.targets == 0


def stored(**sections: Any) -> dict[str, Any]:
    return {"model": {"n_layer": 1}, "data": {"kind": "text", "path": "x"}, "batch": {"micro_size": 4}} | sections


def test_the_stored_config_stands_where_the_command_line_says_nothing() -> None:
    before = stored(precision="bf16", train={"threads": 3, "max_steps": 7}, world={"device": "cuda"}, seed=9)
    config = evaluation_config(before, "run", ["data.val_fraction=0.5", "world.device=cpu"], 3)
    data, model = config.data.model_dump(), config.model.model_dump()
    assert (model["n_layer"], config.batch.micro_size, config.precision, config.train.threads) == (1, 4, "bf16", 3)
    assert (data["path"], data["val_fraction"], config.world.device) == ("x", 0.5, "cpu")
    config = evaluation_config(before, "run", ["precision=fp32", "batch.micro_size=2", "data=byte", "data.path=y"], 1)
    data = config.data.model_dump()
    assert (config.precision, config.batch.micro_size, data["tokens"], data["path"]) == ("fp32", 2, "byte", "y")


@pytest.mark.parametrize(
    ("sections", "overrides"),
    [
        ({"data": {"kind": "own", "_target_": "dangerous.data"}}, []),
        ({"data": {"kind": "text", "path": "x", "_target_": "dangerous.data"}}, []),
        ({"data": {"kind": "own", "_target_": "dangerous.data"}}, ["data.workers=1"]),
        ({"model": {"kind": "own", "_target_": "dangerous.Model"}}, ["data=random"]),
        ({"model": {"kind": "gpt", "_target_": "dangerous.Model"}}, ["data=random"]),
        ({"model": {"kind": ["own"], "_target_": "dangerous.Model"}}, ["data=random"]),
    ],
)
def test_no_code_is_imported_because_a_snapshot_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], overrides: list[str]
) -> None:
    (tmp_path / "dangerous.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError):
        evaluation_config(stored(**sections), "run", overrides, 1)
    assert "dangerous" not in sys.modules


def test_code_of_ones_own_that_ends_the_process_has_evaluated_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def quits(*_: object) -> None:
        raise SystemExit(0)

    monkeypatch.setattr(evaluator, "find_manifest", quits)  # in place of data=own, which is called later
    assert evaluator.command(["x"], Lifetime()) == 70
    assert capsys.readouterr().err.endswith("error: SystemExit: 0\n")


TEXT = "the king is 漢 é <|endoftext|> lo\n"


def test_tokens_know_the_bytes_of_the_text_that_they_stand_for(tmp_path: Path) -> None:
    others = (Characters("".join(sorted(set(TEXT)))), Bytes())
    for vocabulary in (small(), HuggingFaceTokens(write_tokenizer(tmp_path).read_text()), *others):
        assert isinstance(vocabulary, Spelling)
        lengths = vocabulary.byte_lengths()
        assert len(lengths) == vocabulary.size
        assert sum(lengths[i] for i in vocabulary.encode(TEXT)) == len(TEXT.encode())
    assert small().byte_lengths()[small().end_of_text] == 0


def test_the_bytes_of_what_counts_are_counted(model: GPT) -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 0, 0]])
    targets = torch.tensor([[2, 3, 4, 0, IGNORE, IGNORE]])
    figures = evaluate(model, [(tokens, targets)], ALONE, nullcontext(), byte_lengths=[0, 1, 2, 3, 10], seed=1, step=2)
    assert figures.spelled == 2 + 3 + 10
    assert figures.bits_per_byte == pytest.approx(figures.loss * 4 / math.log(2) / 15, rel=1e-12)
    assert evaluate(model, [(tokens, targets)], ALONE, nullcontext(), seed=1, step=2).bits_per_byte is None


def test_a_target_counts_as_many_bytes_as_its_weight_says(model: GPT) -> None:
    """What has no weight in the loss has none in the text; half a weight everywhere changes nothing."""
    tokens, targets = torch.randint(5, (2, 3, 6), generator=torch.Generator().manual_seed(1))
    found = {
        name: evaluate(model, [tensors], ALONE, nullcontext(), byte_lengths=[0, 1, 2, 3, 10], seed=1, step=2)
        for name, tensors in {
            "all": (tokens, targets),
            "half": (tokens, targets, torch.full(targets.shape, 0.5)),
            "ignored": (tokens, targets.masked_fill(targets > 2, IGNORE)),
            "weighted": (tokens, targets, (targets <= 2).float()),
        }.items()
    }
    assert found["weighted"].spelled == found["ignored"].spelled < found["all"].spelled
    assert found["weighted"].bits_per_byte == pytest.approx(found["ignored"].bits_per_byte, rel=1e-6)
    assert found["half"].bits_per_byte == pytest.approx(found["all"].bits_per_byte, rel=1e-6)


def spm(decoder: Any, **parts: Any) -> Tokenizer:
    """As SentencePiece's: a space is a letter of a token, and a character without a token is told byte by byte."""
    vocab = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"aeghiknost\n", "▁k", "in", "▁kin", "▁king"]
    merges = [("▁", "k"), ("i", "n"), ("▁k", "in"), ("▁kin", "g")]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(vocab)}, merges, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoder
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


@pytest.mark.parametrize("decoder", ["replace", "metaspace"])
def test_bytes_of_tokens_that_are_made_of_characters(decoder: str) -> None:
    if decoder == "replace":
        to_text = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        tokenizer = spm(to_text, normalizer=normalizers.Replace(" ", "▁"))
    else:
        to_text = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        tokenizer = spm(to_text, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never"))
    vocabulary = HuggingFaceTokens(tokenizer.to_str())
    lengths, text = vocabulary.byte_lengths(), "the king is 漢 é king\nagain"
    assert [sum(lengths[i] for i in vocabulary.encode(t)) for t in (text, " king", "漢")] == [len(text.encode()), 5, 3]
    assert lengths[vocabulary.end_of_text] == 0


def test_bytes_of_words_are_those_that_decoding_gives() -> None:
    vocab = {"[UNK]": 0, "[SEP]": 1, "king": 2, "##s": 3, "long": 4, ".": 5}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    assert HuggingFaceTokens(tokenizer.to_str()).byte_lengths() == [0, 0, 5, 1, 5, 1]  # a word with the space before it


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "~/.ssh/id_ed25519",
        "../secret.txt",
        "data/../../secret.txt",
        "..\\secret.txt",
        "file:///etc/passwd",
        "local://etc/passwd",
        "http://169.254.169.254/latest/meta-data/iam/",
        "https://localhost/",
        "ftp://host/x",
        "reference::data:application/json;base64,e30=",
        "data:application/json;base64,e30=",
        "filecache::s3://bucket/x",
        "simplecache::file:///etc/passwd",
        "s3://bucket/x::http://host/",
        "github://org:repo@main/x",
        "memory://x",
        "S3://bucket/x",
        "x\nfinished: step 2000",
        "x\0",
    ],
)
@pytest.mark.parametrize("key", ["path", "tokenizer"])
def test_a_place_that_a_stranger_wrote_must_be_given_again(key: str, path: str) -> None:
    data = {"kind": "text", "path": "x", "tokens": "bpe", "tokenizer": "y"}
    with pytest.raises(UserError) as refused:
        evaluation_config(stored(data=data | {key: path}), "run", [], 1)
    [problem] = refused.value.problems
    assert problem.startswith(f"data.{key} is ")
    assert problem.endswith(f": give data.{key}=…")
    assert problem.isprintable()
    config = evaluation_config(stored(data=data | {key: path}), "run", [f"data.{key}=/mine"], 1)
    assert config.data.model_dump()[key] == "/mine"


@pytest.mark.parametrize(
    "path", ["x", "data/a.txt", "data/a b..txt", "s3://bucket/x", "gs://b/x", "az://c/x", "abfs://c/x"]
)
def test_a_plain_place_is_taken_from_a_snapshot(path: str) -> None:
    assert (
        evaluation_config(stored(data={"kind": "text", "path": path}), "run", [], 1).data.model_dump()["path"] == path
    )


def test_a_place_in_a_list_is_a_place() -> None:
    with pytest.raises(UserError, match="http://inside/"):
        evaluation_config(
            stored(data={"kind": "text", "path": "x", "urls": ["a", {"b": "http://inside/"}]}), "run", [], 1
        )


def test_what_costs_memory_and_processors_is_not_a_strangers_to_say() -> None:
    data = {"kind": "shards", "path": "x", "cache_bytes": 2**62, "workers": 1000, "cache_dir": "/etc"}
    kept = evaluation_config(stored(data=data), "run", [], 1).data.model_dump()
    assert (kept["cache_bytes"], kept["workers"], kept["cache_dir"]) == (2**35, 0, "~/.cache/mingpt")
    many = stored(batch={"micro_size": 10**7}, train={"threads": 1024})
    with pytest.raises(UserError) as refused:
        evaluation_config(many, "run", [], 1)
    assert [problem.rpartition(": ")[2] for problem in refused.value.problems] == [
        "give batch.micro_size=…",
        "give train.threads=…",
    ]
    config = evaluation_config(many, "run", ["batch.micro_size=512", "train.threads=65"], 1)
    assert (config.batch.micro_size, config.train.threads) == (512, 65)
