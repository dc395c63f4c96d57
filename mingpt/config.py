"""The typed schema of a run's configuration, and the validation that lists every problem at once.

The attribute docstrings below are the help texts that `python -m mingpt.train --help` prints. The values come from
configs/ and the command line (cli.py); the defaults here serve a key that the command line deleted (`~key`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from mingpt.errors import Mistake

LARGEST = 2**31 - 1  # of any setting but the seed: 68 years in seconds; beyond it torch, numpy and timers overflow
MOST_MICROBATCHES = 1_000_000  # a step keeps a few numbers of each; far beyond, it would take all memory


class Section(BaseModel):
    # Strict types, except that YAML's `1` may stand for a float; inf and nan are never a sensible setting.
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _bounded(cls, value: Any, info: ValidationInfo) -> Any:
        limit = 2**63 - 1 if info.field_name == "seed" else LARGEST
        if isinstance(value, (int, float)) and value > limit:
            raise PydanticCustomError("too_large", "must be at most {limit}", {"limit": limit})
        return value


class Run(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's name: letters, digits, dot, dash and underscore."""
    dir: str = Field(default="runs/run", min_length=1)
    """The run's directory, any fsspec URL; snapshots and metrics are below it. The same dir resumes the run."""


class Train(Section):
    max_steps: int = Field(default=1000, ge=1)
    """Optimizer updates in the whole run, over all its attempts."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of each process. Another number gives other bits."""
    compile: bool = False
    """torch.compile the model: slower to start, faster steps."""
    log_every: int = Field(default=10, ge=1)
    """Steps between two lines of metrics."""
    eval_every: int = Field(default=250, ge=0)
    """Steps between two evaluations on the whole validation split; 0: only at the end."""


class WorldConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU where there is one."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """How the processes talk; auto: nccl on GPUs, gloo on CPUs."""
    timeout_seconds: float = Field(default=600, gt=0)
    """Longest wait for the other processes in a step or a snapshot; then the process ends with exit code 70."""
    init_timeout_seconds: float = Field(default=300, gt=0)
    """Longest wait for the other processes at the start."""


class Batch(Section):
    global_size: int = Field(default=64, ge=1)
    """Samples in a step, whatever the number of processes."""
    micro_size: int = Field(default=16, ge=1)
    """Samples in a microbatch: what is computed at a time. Fewer need less memory. Another number gives other bits."""
    per_process_size: int | None = Field(default=None, ge=1)
    """Samples in a step for each process, in place of global_size. Gives up equal bits across world sizes."""


class Model(Section):
    n_layer: int = Field(default=4, ge=1)
    """Transformer blocks."""
    n_head: int = Field(default=4, ge=1)
    """Attention heads; they divide n_embd."""
    n_embd: int = Field(default=128, ge=1)
    """Width."""
    block_size: int = Field(default=64, ge=1)
    """Tokens that the model sees at a time."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of activations dropped in training."""
    vocab_multiple: int = Field(default=1, ge=1)
    """Pad the embedding to a multiple of this; 64 is faster on GPUs."""


class Data(Section):
    tokens: Literal["char", "byte"] = "char"
    """What a token is: a character of the text, or a byte (256 of them)."""
    path: str = Field(default="data/shakespeare.txt", min_length=1)
    """The text: any fsspec URL (a local path, s3://…, gs://…, https://…)."""
    val_fraction: float = Field(default=0.1, ge=0, lt=1)
    """The share at the end of the text that is kept for validation."""
    stride: int = Field(default=1, ge=1)
    """Tokens between the starts of two samples. 1: every position; block_size: each token once an epoch."""
    workers: int = Field(default=0, ge=0, le=1024)
    """Loader processes for each training process. Never changes what is computed."""
    cache_dir: str = Field(default="~/.cache/mingpt", min_length=1)
    """A local folder for tokenized data, shared by the processes of a node."""
    cache_timeout_seconds: float = Field(default=600, gt=0)
    """Longest wait for another process of the node that is tokenizing."""


class Optimizer(Section):
    name: Literal["adamw"] = "adamw"
    """AdamW; decay on matrices only."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of the matrices."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Largest gradient norm; longer gradients are scaled down to it. 0: no clipping."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate grows with the global batch, against reference_batch."""
    reference_batch: int = Field(default=64, ge=1)
    """The global batch for which lr was tuned."""


class Schedule(Section):
    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = Field(default=100, ge=0)
    """Steps in which the learning rate rises from 0 to its peak."""
    decay_steps: int = Field(default=1000, ge=1)
    """The step at which the decay has ended."""
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    """The learning rate after the decay, as a share of the peak."""


class Snapshot(Section):
    dir: str = Field(default="runs/run/snapshots", min_length=1)
    """Where the snapshots are, any fsspec URL."""
    every_steps: int = Field(default=500, ge=0)
    """Steps between two snapshots; 0: none by steps. There is always one at the end."""
    every_seconds: float = Field(default=0, ge=0)
    """Seconds between two snapshots; 0: none by time."""
    keep: int = Field(default=3, ge=1)
    """How many of the newest snapshots stay."""
    keep_every: int = Field(default=0, ge=0)
    """Snapshots whose step is a multiple of this stay for ever; 0: none."""
    keep_best: bool = True
    """The snapshot with the best validation loss stays too; it counts where it was measured at the snapshot's step."""
    orphan_age_seconds: float = Field(default=86400, ge=0)
    """Files without a snapshot, left by killed writers, are deleted when they are older; 0: never."""
    asynchronous: bool = True
    """Write while training goes on, one at a time: what falls due meanwhile is left out, and the log says so."""
    retry_seconds: float = Field(default=60, ge=0)
    """For how long a write that fails is tried again, with growing pauses."""
    verify_after_write: bool = False
    """Read each part back and compare it before the snapshot counts. Sizes are compared always."""
    hot_every_steps: int = Field(default=20, ge=0)
    """Steps between two hot snapshots, in each node's shared memory: they survive a crash, not the node. 0: none."""
    hot_dir: str = Field(default="/dev/shm", min_length=1)
    """A folder in memory on each node, with room for two snapshots."""
    grace_seconds: float = Field(default=0, ge=0)
    """On a request to stop: longest wait for the durable snapshot, after the hot one. 0: as long as it takes."""
    max_failures: int = Field(default=3, ge=1)
    """The run goes on without snapshots, and says so, until this many in a row have failed."""


class Launch(Section):
    max_attempts_without_progress: int = Field(default=3, ge=1)
    """mingpt.launch gives up after this many attempts in a row that left no new snapshot."""
    shutdown_timeout_seconds: int = Field(default=300, ge=1)
    """Time from a request to stop until mingpt.launch kills: more than a step and a snapshot take."""


class Config(Section):
    run: Run
    seed: int = Field(default=1, ge=0)
    """The seed of everything: weights, order of the samples, dropout."""
    reduce: Literal["exact", "fast"] = "exact"
    """exact: the same bits for any number of processes. fast: plain all-reduce, equal up to rounding."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The numbers that matrix products are computed in; weights and optimizer are fp32 always."""
    train: Train
    world: WorldConfig
    batch: Batch
    model: Model
    data: Data
    optimizer: Optimizer
    schedule: Schedule
    snapshot: Snapshot
    launch: Launch

    def global_size(self, world_size: int) -> int:
        """Samples in a step."""
        per_process = self.batch.per_process_size
        return self.batch.global_size if per_process is None else per_process * world_size


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


def keys() -> dict[str, str]:
    """Every key (`section.name`) with its help text."""
    out: dict[str, str] = {}
    for name, field in Config.model_fields.items():
        if name in SECTIONS:
            out |= {f"{name}.{k}": f.description or "" for k, f in SECTIONS[name].model_fields.items()}
        else:
            out[name] = field.description or ""
    return out


def choices(key: str) -> tuple[str, ...]:
    """The words that a key takes, empty where it takes more than a few words."""
    section, _, name = key.rpartition(".")
    return get_args((SECTIONS[section] if section else Config).model_fields[name].annotation)


def nearest(key: str) -> str:
    """` (did you mean …?)` for a key that does not exist, or an empty string."""
    by_name = {k.rpartition(".")[2]: k for k in keys()}
    section, _, name = key.rpartition(".")
    own = [k.rpartition(".")[2] for k in keys() if k.startswith(f"{section}.")]  # a slip in the name, section right
    for candidates in (own, list(by_name)):
        if close := get_close_matches(name, candidates, n=1, cutoff=0.7):
            right = f"{section}.{close[0]}" if candidates is own else by_name[close[0]]
            return f" (did you mean {right}?)"
    return ""


@dataclass(frozen=True)
class Check:
    """An impossible combination: the keys that it reads, and a test that gives the problem or None.

    Every key that is read is named, so that a check whose keys are mistyped already is passed over: one mistake, one
    line.
    """

    reads: tuple[str, ...]
    problem: Callable[[Config, int], str | None]


def _heads(c: Config, _: int) -> str | None:
    if c.model.n_embd % c.model.n_head:
        return f"model.n_head={c.model.n_head} does not divide model.n_embd={c.model.n_embd}: choose a divisor"
    return None


def _microbatches(c: Config, world_size: int) -> str | None:
    size, micro = c.global_size(world_size), c.batch.micro_size
    if c.batch.per_process_size is not None:
        if c.batch.per_process_size % micro:
            return (
                f"batch.per_process_size={c.batch.per_process_size} is not a multiple of batch.micro_size={micro}: "
                f"choose a multiple"
            )
    elif size % micro:
        below = size // micro * micro
        return f"batch.global_size={size} is not a multiple of batch.micro_size={micro}: " + (
            f"the nearest are {below} and {below + micro}" if below else f"the nearest is {micro}"
        )
    elif size // micro < world_size:
        return (
            f"{world_size} processes, but only {size // micro} microbatches (batch.global_size={size} / "
            f"batch.micro_size={micro}): start at most {size // micro} processes, lower batch.micro_size or "
            f"raise batch.global_size"
        )
    if size // micro > MOST_MICROBATCHES:
        return (
            f"batch.global_size={size} / batch.micro_size={micro} is {size // micro} microbatches a step, more than "
            f"{MOST_MICROBATCHES}: lower batch.global_size or raise batch.micro_size"
        )
    return None


def _backend(c: Config, _: int) -> str | None:
    if c.world.backend == "nccl" and c.world.device == "cpu":
        return "world.backend=nccl needs GPUs, but world.device=cpu: use world.backend=gloo"
    return None


CHECKS = (
    Check(("model.n_head", "model.n_embd"), _heads),
    Check(("batch.global_size", "batch.micro_size", "batch.per_process_size"), _microbatches),
    Check(("world.backend", "world.device"), _backend),
)


def _words(error: Any, key: str) -> str:
    """One line for one of pydantic's findings: the key, what it holds, what it takes."""
    given, kind = error["input"], error["type"]
    if kind == "extra_forbidden":
        return f"{key} is not a key{nearest(key)}"
    if kind == "literal_error":
        close = get_close_matches(str(given), choices(key), n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return f"{key}={given} is not one of {', '.join(choices(key))}{hint}"
    if kind == "string_pattern_mismatch":
        return f"{key}={given!r} may hold letters, digits, '.', '-' and '_' only"
    message = error["msg"].removeprefix("Input ").replace("should", "must")
    return f"{key}={given!r}: {message}"


def validate(
    raw: dict[str, Any],
    world_size: int = 1,
    *,
    also: Sequence[str] = (),
    follows: Mapping[str, Sequence[str]] | None = None,
) -> Config:
    """The typed config of a resolved plain dict.

    also: problems found earlier, to be listed with these. follows: for keys whose values are taken from other keys,
    those keys; a wrong value is told where it comes from, not where it goes.
    Raises Mistake with every problem: unknown keys, wrong types, values out of range, impossible combinations.
    """
    problems, wrong, good = list(also), set[str](), dict[str, Any]()
    for name, value in raw.items():
        if name not in Config.model_fields:
            problems.append(f"{name} is not a key{nearest(name)}")
        elif name not in SECTIONS or isinstance(value, dict):
            good[name] = value
        else:
            problems.append(f"{name}={value!r} is a section of keys, not a value: set {name}.<key>=…")
    for name in SECTIONS:
        good.setdefault(name, {})
    try:
        config = Config.model_validate(good)
    except ValidationError as errors:
        found = {".".join(str(part) for part in error["loc"]): error for error in errors.errors()}
        wrong = set(found)
        for key, error in found.items():
            if not wrong.intersection((follows or {}).get(key, ())):
                problems.append(_words(error, key))
            section, _, leaf = key.rpartition(".")
            if section:
                good[section] = {k: v for k, v in good[section].items() if k != leaf}
            else:
                del good[leaf]
        # With the wrong values replaced by defaults, the combinations of the right ones can still be checked.
        config = Config.model_validate(good)
    for check in CHECKS:
        if not wrong.intersection(check.reads) and (problem := check.problem(config, world_size)):
            problems.append(problem)
    if problems:
        raise Mistake(*problems)
    return config


def without_secrets(value: Any) -> Any:
    """A copy of a plain config in which URLs carry no user, password, signature or token."""
    if isinstance(value, dict):
        return {k: without_secrets(v) for k, v in value.items()}
    if isinstance(value, str) and "://" in value:
        return re.sub(r"\?.*", "?***", re.sub(r"://[^/]*@", "://***@", value))
    return value
