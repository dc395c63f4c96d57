"""Every mistake in a command line is listed, each in a line that names the key and what to do."""

from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from config_kit import problems
from mingpt.config import compose
from mingpt.config.keys import KINDS, keys
from mingpt.data.kinds.shards import ShardsData
from mingpt.errors import UserError

MODELS = (
    "gopher-44m, gpt-micro, gpt-mini, gpt-nano, gpt, gpt2-large, gpt2-medium, gpt2-xl, gpt2, "
    "modern-0.6b, modern-135m, modern-1b, modern-360m, modern-nano, modern, own"
)
SEED = "seed=-1: must be greater than or equal to 0"
DATA_KINDS = ", ".join(KINDS["data"])
OF_TEXT = "is not a key of data.kind=shards, only of text, chat: leave it out, or choose data.kind=text"
NOT_SET = "KeyError raised while resolving interpolation: \"Environment variable 'NOPE' not found\""
GRAMMAR = "is not an override: write key=value, group=option, +key=value or ~key"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # A key that does not exist, with the nearest one that does.
        ("batch.micro_siz=8", ["batch.micro_siz is not a key (did you mean batch.micro_size?)"]),
        ("snapshot.every_second=5", ["snapshot.every_second is not a key (did you mean snapshot.every_seconds?)"]),
        ("modle.n_head=4", ["modle.n_head is not a key (did you mean model.n_head?)"]),
        ("n_head=4", ["n_head is not a key (did you mean model.n_head?)"]),
        ("+model.n_heads=4", ["model.n_heads is not a key (did you mean model.n_head?)"]),
        ("++model.n_heads=4", ["model.n_heads is not a key (did you mean model.n_head?)"]),
        ("zzz=1", ["zzz is not a key"]),
        ("~zzz", ["zzz is not a key"]),
        ("+model.a.b=1", ["model.a is not a key"]),
        ("+seed=7", ["+seed=7: Could not append to config. An item is already at 'seed'."]),
        # A value out of range, of a wrong type, or not one of the words.
        ("batch.micro_size=0", ["batch.micro_size=0: must be greater than or equal to 1"]),
        ("model.dropout=1", ["model.dropout=1: must be less than 1"]),
        (
            "world.device=mps",
            [
                "world.device='mps': Apple's GPUs are not supported, since it is not known whether they repeat their "
                "bits: set it to cpu"
            ],
        ),
        ("optimizer.lr=-0.1", ["optimizer.lr=-0.1: must be greater than 0"]),
        ("optimizer.lr=nan", ["optimizer.lr=nan: must be a finite number"]),
        ("model.n_embd=100000000000000000000", ["model.n_embd=100000000000000000000: must be at most 2147483647"]),
        ("world.timeout_seconds=1e300", ["world.timeout_seconds=1e+300: must be at most 2147483647"]),
        ("seed=9223372036854775808", ["seed=9223372036854775808: must be at most 9223372036854775807"]),
        ("train.threads=100000", ["train.threads=100000: must be less than or equal to 1024"]),
        (
            "batch.global_size=32000000",
            [
                "batch.global_size=32000000 / batch.micro_size=16 is 2000000 microbatches a step, more than 1000000: "
                "lower batch.global_size or raise batch.micro_size"
            ],
        ),
        ("snapshot.keep=0", ["snapshot.keep=0: must be greater than or equal to 1"]),
        ("model.n_layer=abc", ["model.n_layer='abc': must be a valid integer"]),
        ("model.n_layer=1.5", ["model.n_layer=1.5: must be a valid integer"]),
        ("model.n_layer=[1]", ["model.n_layer=[1]: must be a valid integer"]),
        ("train.threads=true", ["train.threads=True: must be a valid integer"]),
        ("train.compile=1", ["train.compile=1: must be a valid boolean"]),
        ("seed=null", ["seed=None: must be a valid integer"]),
        ("run.name=a/b", ["run.name='a/b' may hold letters, digits, '.', '-' and '_' only"]),
        ("reduce=exat", ["reduce=exat is not one of exact, fast (did you mean exact?)"]),
        ("precision=int8", ["precision=int8 is not one of fp32, tf32, bf16, fp16"]),
        # Combinations.
        ("model.n_head=5", ["model.n_head=5 does not divide model.n_embd=128: choose a divisor"]),
        (
            "batch.global_size=65",
            ["batch.global_size=65 is not a multiple of batch.micro_size=16: the nearest are 64 and 80"],
        ),
        (
            "batch.per_process_size=20",
            ["batch.per_process_size=20 is not a multiple of batch.micro_size=16: choose a multiple"],
        ),
        (
            "world.device=cpu world.backend=nccl",
            ["world.backend=nccl needs GPUs, but world.device=cpu: use world.backend=gloo"],
        ),
        # Groups, sections, interpolations, grammar.
        ("model=gpt3", [f"model=gpt3: there is no model 'gpt3' (did you mean gpt?); there are {MODELS}"]),
        (
            "experiment=x",
            [f"experiment=x: there is no experiment 'x'; there are {', '.join(compose.groups()['experiment'])}"],
        ),
        ("world=5", ["world=5 is a section of keys, not a value: set world.<key>=…"]),
        # Kinds of data: each has keys of its own.
        ("data.kind=txt", [f"data.kind=txt is not one of {DATA_KINDS} (did you mean text?)"]),
        ("data.kind=null", [f"data.kind=None is not one of {DATA_KINDS}"]),
        ("data.kind=[1]", [f"data.kind=[1] is not one of {DATA_KINDS}"]),
        ("data.kind=txt data.path=3 seed=-1", [f"data.kind=txt is not one of {DATA_KINDS} (did you mean text?)", SEED]),
        ("data=shards data.path=x data.tokens=char", [f"data.tokens {OF_TEXT}"]),
        ("data=shards data.path=x +data.tokens=char", [f"data.tokens {OF_TEXT}"]),
        ("data=shards data.path=x ~data.tokens", [f"data.tokens {OF_TEXT}"]),
        ("data.kind=shards data.path=x data.tokens=char", [f"data.tokens {OF_TEXT}"]),
        ("data=shards data.path=x data.tokns=char", ["data.tokns is not a key (did you mean data.tokens?)"]),
        (
            "data.tokens=bpe",
            [
                "data.tokens=bpe needs a vocabulary: set data.tokenizer=…, for instance to data/gpt2, which "
                "`mingpt fetch gpt2-vocabulary` writes"
            ],
        ),
        (
            "data.tokenizer=x",
            ["data.tokenizer=x, but data.tokens=char: set data.tokens=bpe, or leave it out"],
        ),
        # A file and the command line set the same key: once.
        (
            "experiment=gpt2_124m data=random data.path=x data.stride=4",
            [
                "data.path is not a key of data.kind=random, only of text, chat, own, shards: leave it out, or "
                "choose data.kind=text",
                "data.stride is not a key of data.kind=random, only of text, shards: leave it out, or choose "
                "data.kind=text",
            ],
        ),
        (
            "experiment=gpt2_124m data=random",
            [
                "data.stride (a file sets it) is not a key of data.kind=random, only of text, shards: write "
                "~data.stride, or choose data.kind=text"
            ],
        ),
        ("model.kind=${oc.env:NOPE}", [f"model.kind: {NOT_SET}"]),
        ("data.kind=${oc.env:NOPE}", [f"data.kind: {NOT_SET}"]),
        ("data.kind=${run.name}", [f"data.kind=run is not one of {DATA_KINDS}"]),
        ("data=shards", [f"data.path: Missing mandatory value: data.path: {ShardsData.missing}"]),
        ("data=char", ["data.path: Missing mandatory value: data.path"]),
        ("data.cache_dir=${nope}", ["data.cache_dir: Interpolation key 'nope' not found"]),
        ("model.n_head", [f"'model.n_head' {GRAMMAR}"]),
        (
            "run.dir=s3://b/d=1",
            [
                f"'run.dir=s3://b/d=1' {GRAMMAR}; a value with marks such as = in it stands in quotes of its own: "
                "key='a=b'"
            ],
        ),
        (
            "schedule=wsd schedule.cooldown_steps=50 train.max_steps=10",
            ["schedule.cooldown_steps=50 is longer than schedule.decay_steps=10: lower it, or choose schedule=linear"],
        ),
        ("seed=1,2", ["seed=1,2: a sweep over values is for `mingpt sweep`: give one, or a list as key=[a,b]"]),
        # Several at once. A combination is passed over where one of its keys is mistyped already.
        (
            "model=gpt3 schedule=cos model.n_head=7",
            [
                f"model=gpt3: there is no model 'gpt3' (did you mean gpt?); there are {MODELS}",
                "schedule=cos: there is no schedule 'cos' (did you mean cosine?); "
                "there are constant, cosine, linear, wsd",
                "model.n_head=7 does not divide model.n_embd=128: choose a divisor",
            ],
        ),
        ("model.n_head=5 model.n_embd=abc", ["model.n_embd='abc': must be a valid integer"]),
        (
            "batch.global_size=65 model.n_head=5 precision=fp63 train.max_step=4 ( +new=1 data.cache_dir=${nope}",
            [
                f"'(' {GRAMMAR}",
                "train.max_step is not a key (did you mean train.max_steps?)",
                "new is not a key",
                "data.cache_dir: Interpolation key 'nope' not found",
                "precision=fp63 is not one of fp32, tf32, bf16, fp16 (did you mean fp32?)",
                "model.n_head=5 does not divide model.n_embd=128: choose a divisor",
                "batch.global_size=65 is not a multiple of batch.micro_size=16: the nearest are 64 and 80",
            ],
        ),
    ],
)
def test_a_bad_command_line_gives_exactly_its_problems(arguments: str, expected: list[str]) -> None:
    assert problems(*arguments.split()) == expected


def test_more_processes_than_microbatches_are_refused() -> None:
    assert compose.configure([], world_size=4) is not None
    assert problems(world_size=8) == [
        "8 processes, but only 4 microbatches (batch.global_size=64 / batch.micro_size=16): start at most 4 processes, "
        "lower batch.micro_size or raise batch.global_size"
    ]
    assert problems("experiment=gpt2_124m", "data.path=x", world_size=65) == [
        "65 processes, but only 64 microbatches (batch.global_size=512 / batch.micro_size=8): start at most 64 "
        "processes, lower batch.micro_size or raise batch.global_size"
    ]


def test_a_size_for_each_process_serves_any_number_of_them() -> None:
    assert compose.configure(["batch.per_process_size=16"], world_size=100) is not None
    # global_size is out of the game then.
    assert compose.configure(["batch.per_process_size=16", "batch.global_size=65"], world_size=2) is not None


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        # schedule.decay_steps and snapshot.dir follow these keys: their problems are the same one again.
        ("train.max_steps=0", ["train.max_steps=0: must be greater than or equal to 1"]),
        ("run.dir=${nope}", ["run.dir: Interpolation key 'nope' not found"]),
        (
            "batch.global_size=10",
            ["batch.global_size=10 is not a multiple of batch.micro_size=16: the nearest is 16"],
        ),
    ],
)
def test_one_mistake_is_told_once(mistake: str, expected: list[str]) -> None:
    assert problems(mistake) == expected


# In a circle, each key's problem seems to be the next one's: none of them may be hidden for that.
@pytest.mark.parametrize(
    "circle",
    [
        "run.dir=${run.dir}",
        "run.dir=${run.dir}/x",
        "run.name=${run.dir}",
        "seed=${train.threads} train.threads=${seed}",
    ],
)
def test_a_circle_of_interpolations_is_a_mistake(circle: str) -> None:
    found = problems(*circle.split())
    key = circle.partition("=")[0]
    assert f"{key}: Recursive interpolation detected" in found
    assert all(problem.endswith(": Recursive interpolation detected") for problem in found)


# Hydra answers these with a ValueError or TypeError of its own.
@pytest.mark.parametrize("argument", ["model=null", "model=5", "experiment=null", "=3", "model=gpt2,gpt2-xl"])
def test_a_group_that_is_not_one_word_is_a_mistake(argument: str) -> None:
    [problem] = problems(argument)
    assert argument in problem


def test_a_refused_override_does_not_show_its_secret() -> None:
    """`?` needs quotes in Hydra's grammar, and a user who forgets them has a signed URL in the log."""
    [problem] = problems("data.path=https://user:password@host/x?sig=abc")
    assert "data.path" in problem
    assert "password" not in problem
    assert "abc" not in problem


PIECES = st.sampled_from(
    [
        *keys(),
        *compose.groups(),
        *"=+~.,:${}[]()'\"\\@/ \nä1",
        "++",
        "null",
        "???",
        "1e3",
        "gpt2",
        "${run.name}",
        "hydra",
    ]
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(PIECES, min_size=1, max_size=5).map("".join))
@example("seed=1")
@example("+snapshot=-,data")
@example("=1")
def test_whatever_is_typed_is_a_config_or_a_mistake(argument: str) -> None:
    with suppress(UserError):
        assert compose.configure([argument]) is not None
