"""The typed schema of a run's configuration: every key with its default, bounds and help text, said nowhere else.

The attribute docstrings are the help texts that `mingpt train --help` prints. The keys of `model` and `data`
depend on their kind, and stand in the kind's own module (kinds.py). A YAML file in configs/ holds only what differs
from the defaults here. validation.py lists what is wrong.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, field_validator
from pydantic_core import PydanticCustomError

from mingpt.config import plugin
from mingpt.config.kinds import Data, Model
from mingpt.config.section import NO_RESULT, AffectsResult, Own, Section, follows


class Run(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's name: letters, digits, dot, dash and underscore."""
    dir: str = follows("runs/${run.name}", min_length=1)
    """The run's directory, any fsspec URL; snapshots and metrics are below it. The same dir resumes the run."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """What all machines of the run cost in an hour, in any currency: then the run says what it has cost."""


class Train(Section):
    max_steps: Annotated[int, NO_RESULT] = Field(default=1000, ge=1)
    """Optimizer updates in the whole run, over all its attempts."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of each process. Another number gives other bits."""
    compile: bool = False
    """torch.compile each block (a model of your own: whole): slower to start, faster steps."""
    cuda_graphs: Annotated[bool | Literal["auto"], NO_RESULT] = "auto"
    """Replay microbatches as one CUDA graph: same bits, less work for the host. auto: on GPUs, if memory allows."""
    recompute: Annotated[Literal["none", "block"], NO_RESULT] = "none"
    """block: keep only the activations between blocks, and compute the others again in backward. Same bits."""
    loss_rows: int = Field(default=0, ge=0)
    """Positions of a microbatch whose logits are in memory at a time, for large vocabularies; 0: all. Other bits."""
    log_every: Annotated[int, NO_RESULT] = Field(default=10, ge=1)
    """Steps between two lines of metrics."""
    eval_every: Annotated[int, NO_RESULT] = Field(default=250, ge=0)
    """Steps between two evaluations on the validation split; 0: only at the end."""
    eval_batches: Annotated[int | None, NO_RESULT] = Field(default=None, ge=0)
    """Microbatches of an evaluation, spread over the validation split; 0: all of it. null: 131072 tokens at most."""
    sample_every: Annotated[int, NO_RESULT] = Field(default=0, ge=0)
    """Steps between two texts that process 0 writes with the weights as they are: in log, trackers, report. 0: none."""
    sample_prompt: Annotated[str | None, NO_RESULT] = Field(default=None, min_length=1)
    """What these texts continue; null: a line feed."""
    attention: Literal["torch", "fa3"] = "torch"
    """fa3: by FlashAttention-3 (flash-attn-3 of PyTorch's own index), on H100 and H200, in bf16 or fp16. Other bits."""
    freeze: list[str] = Field(default=[])
    """Parameters that stay as they are: names, or patterns such as 'transformer.h.[0-5].*' or '*.bias'."""


class WorldConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU where there is one."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """How the processes talk; auto: nccl on GPUs, gloo on CPUs. With gloo, the processes of a node may share GPUs."""
    timeout_seconds: float = Field(default=600, gt=0)
    """Longest wait for the other processes in a step or a snapshot, and for a silent node; then exit code 70."""
    init_timeout_seconds: float = Field(default=300, gt=0)
    """Longest wait for the other processes at the start."""
    notice: str = Field(default="auto", pattern=r"^(auto|none|(aws|gcp|azure):https?://\S+)$")
    """Who says that this machine will be taken: auto (the cloud named by its firmware), none, aws:URL, gcp:, azure:."""

    @field_validator("device", mode="before")
    @classmethod
    def _no_apple(cls, device: object) -> object:
        if device == "mps":
            why = "Apple's GPUs are not supported: they have no float64, in which losses are added: set it to cpu"
            raise PydanticCustomError("mps", why)
        return device


class Batch(Section):
    global_size: Annotated[int, AffectsResult(lambda batch: batch.get("per_process_size") is None)] = Field(
        default=64, ge=1
    )
    """Samples in a step, whatever the number of processes."""
    micro_size: int = Field(default=16, ge=1)
    """Samples computed at a time. Fewer need less memory, and give other bits."""
    double_at: Annotated[list[int], AffectsResult(lambda batch: bool(batch.get("double_at")))] = Field(default=[])
    """Steps at which the batch doubles, up to global_size: [500,2000] begins with a quarter. So do microbatches."""
    per_process_size: int | None = Field(default=None, ge=1)
    """Samples in a step for each process, in place of global_size. Gives up equal bits across world sizes."""


class Optimizer(Section):
    target: str = Field(default="", alias="_target_")
    """A class of one's own, package.module.Name, in place of `name`: docs/workloads-own-parts.md."""
    name: Literal["adamw", "muon"] = "adamw"
    """adamw; or muon for weight matrices, and AdamW for embeddings, the output layer, norms and biases."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    embedding_ratio: float = Field(default=1.0, gt=0)
    """Learning rate of embeddings, as a share of lr."""
    head_ratio: float = Field(default=1.0, gt=0)
    """Learning rate of an output layer of its own (of an own model: its lm_head or head), as a share of lr."""
    vector_ratio: float = Field(default=1.0, gt=0)
    """Learning rate of norms and biases, as a share of lr."""
    momentum: Annotated[float, AffectsResult(lambda o: o.get("name") == "muon" or bool(o.get("_target_")))] = Field(
        default=0.95, ge=0, lt=1
    )
    """Muon's momentum."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of the matrices."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Largest gradient norm; longer gradients are scaled down to it. 0: no clipping."""
    ema: Annotated[float, AffectsResult(lambda optimizer: bool(optimizer.get("ema")))] = Field(default=0.0, ge=0, lt=1)
    """Decay of a mean of the weights, such as 0.999; evaluate, generate and export take it with --ema. 0: none."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate grows with the global batch, against reference_batch."""
    reference_batch: Annotated[int, AffectsResult(lambda optimizer: optimizer.get("lr_scaling") != "none")] = follows(
        "${batch.global_size}", ge=1
    )
    """The global batch for which lr was tuned."""
    shard: Annotated[bool, NO_RESULT] = True
    """With reduce=exact: each process updates a slice of the weights, and has its optimizer state only. Same bits."""


class OwnOptimizerSection(Optimizer, Own): ...


class Schedule(Section):
    target: str = Field(default="", alias="_target_")
    """A function of one's own, package.module.name, in place of `kind`: step -> share of optimizer.lr."""
    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up. wsd: stable, then a straight line down, as linear."""
    warmup_steps: int = Field(default=100, ge=0)
    """Steps in which the learning rate rises from 0 to its peak."""
    decay_steps: Annotated[int, AffectsResult(lambda schedule: schedule.get("kind") != "constant")] = follows(
        "${train.max_steps}", ge=1
    )
    """The step at which the decay has ended."""
    cooldown_steps: Annotated[int | None, AffectsResult(lambda schedule: schedule.get("kind") == "wsd")] = Field(
        default=None, ge=1
    )
    """Steps of wsd's decay, the last ones before decay_steps; null: a fifth of decay_steps."""
    min_ratio: Annotated[float, AffectsResult(lambda schedule: schedule.get("kind") != "constant")] = Field(
        default=0.1, ge=0, le=1
    )
    """The learning rate after the decay, as a share of the peak."""

    @property
    def stable_until(self) -> int:
        """The steps before the decay of wsd; 0 for other kinds. From their end a run can be extended exactly."""
        cooldown = self.cooldown_steps or -(-self.decay_steps // 5)
        return max(0, self.decay_steps - cooldown) if self.kind == "wsd" and not self.target else 0


class OwnSchedule(Schedule, Own):
    """A section with `_target_`. Who reads a stored one makes a Schedule of it, which calls nothing."""

    @cached_property
    def share(self) -> Callable[[int], float]:
        """The learning rate of a step, counted from 0, as a share of its peak."""
        return plugin.schedule(self)


class Health(Section):
    spike_sigma: float = Field(default=0, ge=0)
    """Skip a step whose loss is this many standard deviations above the mean of the last ones. 0: none for that."""
    spike_window: Annotated[int, AffectsResult(lambda health: health.get("spike_sigma") != 0)] = Field(
        default=128, ge=8, le=1024
    )
    """How many of the last losses that mean is taken over. Until there are so many, no loss is a spike."""
    max_skips: Annotated[int, AffectsResult(lambda health: health.get("max_rollbacks") != 0)] = Field(default=100, ge=1)
    """Steps skipped in a row, for a spike or a number that is not finite, after which the run has diverged."""
    max_rollbacks: int = Field(default=0, ge=0, le=64)
    """How often a run that has diverged goes back to a snapshot and leaves out the skipped batches; then exit 64."""
    hang_seconds: Annotated[float, NO_RESULT] = Field(default=300, ge=0, le=86400)
    """The run hangs if no process has read a microbatch or entered a collective for so long; then exit 70. 0: never."""
    straggler_ratio: Annotated[float, NO_RESULT] = Field(default=1.5, ge=0)
    """Name a process whose microbatches, or their data, take this many times as long as the median. 0: never."""
    notify: Annotated[str | None, NO_RESULT] = None
    """A webhook that gets JSON when an attempt ends or something is wrong. It is a secret: give '${oc.env:NAME}'."""


class Snapshot(Section):
    dir: str = follows("${run.dir}/snapshots", min_length=1)
    """Where the snapshots are, any fsspec URL."""
    every_steps: int = Field(default=500, ge=0)
    """Steps between two snapshots; 0: none by steps. There is always one at the end."""
    every_seconds: float = Field(default=600, ge=0)
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
    """On a request to stop: longest wait for the durable snapshot, after the hot one. 0: world.timeout_seconds."""
    max_failures: int = Field(default=3, ge=1)
    """The run goes on without snapshots, and says so, until this many in a row have failed."""


def steps_to_profile(text: str) -> range:
    """Steps, counted from 1, of a text such as 100:103. Raises ValueError for another text, or if there is none."""
    first, end = (int(number) for number in text.split(":"))
    if not 0 < first < end:
        raise ValueError(text)
    return range(first, end)


class Profile(Section):
    steps: str | None = None
    """FIRST:END, steps that torch.profiler records in process 0, for Perfetto: 100:103 are steps 100, 101 and 102."""


class Resume(Section):
    changed: bool = False
    """Go on although settings that affect the result have changed since the snapshot; the history keeps both values."""
    take_over: bool = False
    """Start although an attempt of this run is training on this machine; that one ends before its next snapshot."""
    anew: bool = False
    """Go on from what is here (nothing: step 1) although the run is on the disk of a machine that is missing."""


class Launch(Section):
    max_attempts_without_progress: int = Field(default=3, ge=1)
    """`mingpt launch` gives up after this many attempts in a row that left no new snapshot."""
    shutdown_timeout_seconds: int = Field(default=300, ge=1)
    """Time from a request to stop until `mingpt launch` kills: more than a step and a snapshot take."""


class Config(Section):
    run: Annotated[Run, NO_RESULT]
    seed: int = Field(default=1, ge=0)
    """The seed of everything: weights, order of the samples, dropout."""
    reduce: Literal["exact", "fast"] = "exact"
    """exact: the same bits for any number of processes. fast: plain all-reduce, equal up to rounding."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """The numbers that matrix products are computed in; weights and optimizer are fp32 always. tf32: on GPUs only."""
    train: Train
    world: Annotated[WorldConfig, NO_RESULT]
    batch: Batch
    model: SerializeAsAny[Model]
    """What is trained: a GPT, or a module of one's own."""
    data: SerializeAsAny[Data]
    """What the tokens come from; each kind of data has keys of its own."""
    optimizer: SerializeAsAny[Optimizer]
    schedule: SerializeAsAny[Schedule]
    health: Health
    snapshot: Annotated[Snapshot, NO_RESULT]
    resume: Annotated[Resume, NO_RESULT]
    launch: Annotated[Launch, NO_RESULT]
    profile: Annotated[Profile, NO_RESULT]
    track: Annotated[list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] | None, NO_RESULT] = None
    """Where curves go, such as [tensorboard,wandb]. null: to TensorBoard, if it is installed. []: nowhere."""
    observers: Annotated[list[Own], NO_RESULT] = Field(default=[])
    """Classes of one's own that get each event, such as '[{_target_: package.module.Name, size: 3}]'."""

    @property
    def shards(self) -> bool:
        """Whether each process of several keeps a slice of the optimizer's state alone."""
        return self.optimizer.shard and self.reduce == "exact"

    def global_size(self, world_size: int) -> int:
        """Samples in a step."""
        per_process = self.batch.per_process_size
        return self.batch.global_size if per_process is None else per_process * world_size


OWN: dict[str, type[Own]] = {
    "optimizer": OwnOptimizerSection,
    "schedule": OwnSchedule,
}  # what a section is if its `_target_` is set
