"""The typed schema of a run's configuration.

The attribute docstrings below are the help texts that `mingpt train --help` prints. The values come from
configs/ and the command line (compose.py); the defaults here serve a key that the command line deleted (`~key`).
validation.py lists what is wrong. A field says itself whether its value affects the result: all do but those that are
marked NO_RESULT or AffectsResult; affecting.py asks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

LARGEST = (
    2**31 - 1
)  # of any setting but seed and cache_bytes: 68 years in seconds; beyond it torch, numpy and timers overflow


@dataclass(frozen=True)
class AffectsResult:
    """On a field: whether another value gives other bits, which may depend on the values of its section."""

    when: Callable[[Mapping[str, Any]], bool]


NO_RESULT = AffectsResult(lambda section: False)


class Section(BaseModel):
    # Strict types, except that YAML's `1` may stand for a float; inf and nan are never a sensible setting.
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        serialize_by_alias=True,  # `_target_`, which can't be an attribute's name
    )

    @field_validator("*")
    @classmethod
    def _bounded(cls, value: Any, info: ValidationInfo) -> Any:
        limit = 2**63 - 1 if info.field_name in ("seed", "cache_bytes") else LARGEST
        if isinstance(value, (int, float)) and value > limit:
            raise PydanticCustomError("too_large", "must be at most {limit}", {"limit": limit})
        return value


class Run(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's name: letters, digits, dot, dash and underscore."""
    dir: str = Field(default="runs/run", min_length=1)
    """The run's directory, any fsspec URL; snapshots and metrics are below it. The same dir resumes the run."""


class Train(Section):
    max_steps: Annotated[int, NO_RESULT] = Field(default=1000, ge=1)
    """Optimizer updates in the whole run, over all its attempts."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of each process. Another number gives other bits."""
    compile: bool = False
    """torch.compile the model: slower to start, faster steps."""
    log_every: Annotated[int, NO_RESULT] = Field(default=10, ge=1)
    """Steps between two lines of metrics."""
    eval_every: Annotated[int, NO_RESULT] = Field(default=250, ge=0)
    """Steps between two evaluations on the whole validation split; 0: only at the end."""
    freeze: list[str] = []
    """Parameters that stay as they are: names, or patterns such as 'transformer.h.[0-5].*' or '*.bias'."""


class WorldConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU where there is one."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """How the processes talk; auto: nccl on GPUs, gloo on CPUs."""
    timeout_seconds: float = Field(default=600, gt=0)
    """Longest wait for the other processes in a step or a snapshot, and for a silent node; then exit code 70."""
    init_timeout_seconds: float = Field(default=300, gt=0)
    """Longest wait for the other processes at the start."""


class Batch(Section):
    global_size: Annotated[int, AffectsResult(lambda batch: batch.get("per_process_size") is None)] = Field(
        default=64, ge=1
    )
    """Samples in a step, whatever the number of processes."""
    micro_size: int = Field(default=16, ge=1)
    """Samples in a microbatch: what is computed at a time. Fewer need less memory. Another number gives other bits."""
    per_process_size: int | None = Field(default=None, ge=1)
    """Samples in a step for each process, in place of global_size. Gives up equal bits across world sizes."""


class Own(Section):
    """A section whose `_target_` names code of the user's own; its other keys are that code's arguments."""

    model_config = ConfigDict(extra="allow")

    target: str = Field(default="", alias="_target_")

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class Model(Section):
    kind: Literal["gpt"] = "gpt"
    """a GPT-2 of any size"""
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
    init_from: Annotated[str | None, NO_RESULT] = Field(default=None, min_length=1)
    """Start with these weights: a folder with a GPT-2's config.json and model.safetensors, any fsspec URL."""


class OwnModel(Own):
    kind: Literal["own"] = "own"
    """a module of one's own; its other keys are its arguments"""
    target: str = Field(default="", alias="_target_")
    """A class or function, package.module.Name, that gives the torch module."""
    block_size: int = Field(default=1, ge=1)
    """Tokens in a sample of data that is cut into samples; an argument, too, if there is one of this name."""


class Data(Section):
    """What every kind of data has. Each kind is a section of its own, told apart by `kind`."""

    kind: str
    workers: Annotated[int, NO_RESULT] = Field(default=0, ge=0, le=1024)
    """Loader processes for each training process. Never changes what is computed."""


class CachedData(Data):
    """Data from files, of which each node keeps a tokenized or downloaded copy."""

    cache_dir: Annotated[str, NO_RESULT] = Field(default="~/.cache/mingpt", min_length=1)
    """A local folder for tokenized or downloaded data, shared by the processes of a node."""
    cache_timeout_seconds: Annotated[float, NO_RESULT] = Field(default=600, gt=0)
    """Longest wait for another process of the node that is tokenizing or downloading."""


class RowData(CachedData):
    """Data that is one long row of tokens, out of which samples are cut."""

    stride: int = Field(default=1, ge=1)
    """Tokens between the starts of two samples. 1: every position; block_size: each token once an epoch."""


class TextData(RowData):
    kind: Literal["text"] = "text"
    """one text, tokenized at the start"""
    path: Annotated[str, NO_RESULT] = Field(default="data/shakespeare.txt", min_length=1)
    """The text: any fsspec URL (a local path, s3://…, gs://…, https://…)."""
    tokens: Literal["char", "byte", "bpe"] = "char"
    """What a token is: a character of the text, a byte (256 of them), or a piece of a word (data.tokenizer)."""
    tokenizer: Annotated[str | None, NO_RESULT] = Field(default=None, min_length=1)
    """The vocabulary of bpe: a folder with GPT-2's vocab.bpe and encoder.json, or a tokenizer.json; any fsspec URL."""
    val_fraction: float = Field(default=0.1, ge=0, lt=1)
    """The share at the end of the text that is kept for validation."""


class ShardsData(RowData):
    kind: Literal["shards"] = "shards"
    """any amount of text, tokenized before"""
    path: Annotated[str, NO_RESULT] = Field(default="data/shards", min_length=1)
    """The folder that mingpt.data.prepare has written, or one with nanoGPT's train.bin and val.bin: any fsspec URL."""
    tokenizer: Annotated[str | None, NO_RESULT] = Field(default=None, min_length=1)
    """The vocabulary of nanoGPT's files, which name none, as for text; null: numbers, which spell no text."""
    cache_bytes: Annotated[int, NO_RESULT] = Field(default=2**35, ge=1)
    """Most bytes of shards that a node keeps in cache_dir, when data.path is no local folder."""


class OwnData(Data, Own):
    kind: Literal["own"] = "own"
    """data of one's own; its other keys are its arguments"""
    target: str = Field(default="", alias="_target_")
    """A function, package.module.name, that gives the mingpt.data.source.Source."""


class ImagesData(CachedData):
    kind: Literal["images"] = "images"
    """images as tokens, each followed by its label"""
    path: Annotated[str, NO_RESULT] = Field(default="data/mnist", min_length=1)
    """MNIST's or Fashion-MNIST's folder, CIFAR-10's (binary version) or its .tar.gz: any fsspec URL."""
    patch: int = Field(default=4, ge=1, le=64)
    """Side of a patch in pixels; each patch is a token. It divides the images' height and width."""
    codes: int = Field(default=256, ge=2, le=2**16)
    """Different patches that there are tokens for: the codebook, fitted to the training images."""
    classes: int = Field(default=10, ge=1, le=256)
    """Labels are numbers from 0 to classes - 1."""
    shift: int = Field(default=0, ge=0, le=8)
    """Training shows each image moved by up to so many pixels each way: in (2 shift + 1)² places."""
    image_weight: float = Field(default=0.1, ge=0)
    """How much an image's token counts; its label counts 1. 0: learn nothing but labels."""
    draw: bool = False
    """Training shows each image a second time with its label first: learn to draw what is asked for."""


class QuestionData(Data):
    """Questions that are made, not read. Each kind says how many there are and how many tokens one takes."""

    val_samples: int = Field(default=1000, ge=0)
    """Questions that are kept for validation; training never asks them."""

    @property
    def questions(self) -> int:
        """How many different questions there are."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """The tokens that the model sees of a question with its answer: all but the last."""
        raise NotImplementedError


class AdditionData(QuestionData):
    kind: Literal["addition"] = "addition"
    """sums, as 07+35=042"""
    digits: int = Field(default=2, ge=1, le=9)
    """Digits of each of the two numbers; the sum has one more."""
    reverse: bool = False
    """Write the sum from its last digit to its first, 07+35=240: the order in which carrying finds them."""

    @property
    def questions(self) -> int:
        return 10 ** (2 * self.digits)

    @property
    def length(self) -> int:
        return 3 * self.digits + 2


class SortData(QuestionData):
    kind: Literal["sort"] = "sort"
    """letters to put in order, as 3120=0123"""
    letters: int = Field(default=8, ge=1, le=64)
    """How many letters a question has."""
    alphabet: int = Field(default=10, ge=2, le=62)
    """How many different letters there are: 0 to 9, A to Z, a to z."""

    @property
    def questions(self) -> int:
        return int(self.alphabet**self.letters)

    @property
    def length(self) -> int:
        return 2 * self.letters


class RandomData(Data):
    kind: Literal["random"] = "random"
    """random tokens without a file, to measure speed with"""
    vocabulary: int = Field(default=50257, ge=2, le=2**24)
    """How many different tokens there are."""
    samples: int = Field(default=1_000_000, ge=1)
    """How many samples, of model.block_size tokens each."""


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
    reference_batch: Annotated[int, AffectsResult(lambda optimizer: optimizer.get("lr_scaling") != "none")] = Field(
        default=64, ge=1
    )
    """The global batch for which lr was tuned."""


class Schedule(Section):
    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = Field(default=100, ge=0)
    """Steps in which the learning rate rises from 0 to its peak."""
    decay_steps: Annotated[int, AffectsResult(lambda schedule: schedule.get("kind") != "constant")] = Field(
        default=1000, ge=1
    )
    """The step at which the decay has ended."""
    min_ratio: Annotated[float, AffectsResult(lambda schedule: schedule.get("kind") != "constant")] = Field(
        default=0.1, ge=0, le=1
    )
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


class Resume(Section):
    changed: bool = False
    """Go on although settings that affect the result have changed since the snapshot; the history keeps both values."""


class Launch(Section):
    max_attempts_without_progress: int = Field(default=3, ge=1)
    """mingpt.launch gives up after this many attempts in a row that left no new snapshot."""
    shutdown_timeout_seconds: int = Field(default=300, ge=1)
    """Time from a request to stop until mingpt.launch kills: more than a step and a snapshot take."""


class Config(Section):
    run: Annotated[Run, NO_RESULT]
    seed: int = Field(default=1, ge=0)
    """The seed of everything: weights, order of the samples, dropout."""
    reduce: Literal["exact", "fast"] = "exact"
    """exact: the same bits for any number of processes. fast: plain all-reduce, equal up to rounding."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The numbers that matrix products are computed in; weights and optimizer are fp32 always."""
    train: Train
    world: Annotated[WorldConfig, NO_RESULT]
    batch: Batch
    model: Annotated[Model | OwnModel, Field(discriminator="kind")]
    """What is trained: a GPT, or a module of one's own."""
    data: Annotated[
        TextData | ShardsData | ImagesData | AdditionData | SortData | RandomData | OwnData, Field(discriminator="kind")
    ]
    """What the tokens come from; each kind of data has keys of its own."""
    optimizer: Optimizer
    schedule: Schedule
    snapshot: Annotated[Snapshot, NO_RESULT]
    resume: Annotated[Resume, NO_RESULT]
    launch: Annotated[Launch, NO_RESULT]

    def global_size(self, world_size: int) -> int:
        """Samples in a step."""
        per_process = self.batch.per_process_size
        return self.batch.global_size if per_process is None else per_process * world_size
