"""The typed schema of a run's configuration.

The attribute docstrings below are the help texts that `python -m mingpt.train --help` prints. The values come from
configs/ and the command line (cli.py); the defaults here serve a key that the command line deleted (`~key`).
validation.py lists what is wrong.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

LARGEST = (
    2**31 - 1
)  # of any setting but seed and cache_bytes: 68 years in seconds; beyond it torch, numpy and timers overflow


class Section(BaseModel):
    # Strict types, except that YAML's `1` may stand for a float; inf and nan are never a sensible setting.
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
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
    """What every kind of data has. Each kind is a section of its own, told apart by `kind`."""

    kind: str
    workers: int = Field(default=0, ge=0, le=1024)
    """Loader processes for each training process. Never changes what is computed."""


class CachedData(Data):
    """Data from files, of which each node keeps a tokenized or downloaded copy."""

    stride: int = Field(default=1, ge=1)
    """Tokens between the starts of two samples. 1: every position; block_size: each token once an epoch."""
    cache_dir: str = Field(default="~/.cache/mingpt", min_length=1)
    """A local folder for tokenized or downloaded data, shared by the processes of a node."""
    cache_timeout_seconds: float = Field(default=600, gt=0)
    """Longest wait for another process of the node that is tokenizing or downloading."""


class TextData(CachedData):
    kind: Literal["text"] = "text"
    """one text, tokenized at the start"""
    path: str = Field(default="data/shakespeare.txt", min_length=1)
    """The text: any fsspec URL (a local path, s3://…, gs://…, https://…)."""
    tokens: Literal["char", "byte", "bpe"] = "char"
    """What a token is: a character of the text, a byte (256 of them), or a piece of a word (data.tokenizer)."""
    tokenizer: str | None = Field(default=None, min_length=1)
    """The vocabulary of bpe: a folder with GPT-2's vocab.bpe and encoder.json, or a tokenizer.json; any fsspec URL."""
    val_fraction: float = Field(default=0.1, ge=0, lt=1)
    """The share at the end of the text that is kept for validation."""


class ShardsData(CachedData):
    kind: Literal["shards"] = "shards"
    """any amount of text, tokenized before"""
    path: str = Field(default="data/shards", min_length=1)
    """The folder that mingpt.data.prepare has written, or one with nanoGPT's train.bin and val.bin: any fsspec URL."""
    tokenizer: str | None = Field(default=None, min_length=1)
    """The vocabulary of nanoGPT's files, which name none, as for text; null: numbers, which spell no text."""
    cache_bytes: int = Field(default=2**35, ge=1)
    """Most bytes of shards that a node keeps in cache_dir, when data.path is no local folder."""


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
    data: Annotated[TextData | ShardsData, Field(discriminator="kind")]
    """What the tokens come from; each kind of data has keys of its own."""
    optimizer: Optimizer
    schedule: Schedule
    snapshot: Snapshot
    launch: Launch

    def global_size(self, world_size: int) -> int:
        """Samples in a step."""
        per_process = self.batch.per_process_size
        return self.batch.global_size if per_process is None else per_process * world_size


def without_secrets(value: Any) -> Any:
    """A copy of a plain config in which URLs carry no user, password, signature or token."""
    if isinstance(value, dict):
        return {k: without_secrets(v) for k, v in value.items()}
    if isinstance(value, str) and "://" in value:
        return re.sub(r"\?.*", "?***", re.sub(r"://[^/]*@", "://***@", value))
    return value
