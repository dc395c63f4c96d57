"""What cannot go together in a config, and which local places are not there. What one kind forbids, it says itself."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from mingpt.config import plugin
from mingpt.config.imports import installed
from mingpt.config.kinds import Data, of_part
from mingpt.config.schema import Config, steps_to_profile
from mingpt.config.section import Own, Section
from mingpt.files import hub
from mingpt.files.storage import S3_ENDPOINTS, fetch_it, install, names_a_disk

# Trackers that keep files: the variables that say where, one of which is needed if run.dir is a bucket.
PLACES = {"mlflow": ("MLFLOW_TRACKING_URI",), "trackio": ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")}
MOST_MICROBATCHES = 1_000_000  # a step keeps a few numbers of each; far beyond, it would take all memory
HUB_KEYS = ("init_from", "tokenizer", "template")  # in whose values OWNER/NAME is a model of the hub


@dataclass(frozen=True)
class Check:
    """An impossible combination: the keys that it reads, and a test that gives the problem or None.

    Every key that is read is named, so that a check whose keys are mistyped already is passed over: one mistake, one
    line.
    """

    reads: tuple[str, ...]
    problem: Callable[[Config], str | None]


def _cooldown(c: Config) -> str | None:
    s = c.schedule
    if s.kind == "wsd" and s.cooldown_steps and s.cooldown_steps > s.decay_steps:
        return (
            f"schedule.cooldown_steps={s.cooldown_steps} is longer than schedule.decay_steps={s.decay_steps}: lower "
            f"it, or choose schedule=linear"
        )
    return None


def _microbatches(world_size: int, c: Config) -> str | None:
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
            f"raise batch.global_size (to {micro * world_size})"
        )
    if size // micro > MOST_MICROBATCHES:
        return (
            f"batch.global_size={size} / batch.micro_size={micro} is {size // micro} microbatches a step, more than "
            f"{MOST_MICROBATCHES}: lower batch.global_size or raise batch.micro_size"
        )
    return None


def _doubling(c: Config) -> str | None:
    steps, micro = c.batch.double_at, c.batch.micro_size
    if steps != sorted({0, *steps})[1:]:
        return f"batch.double_at={steps}: give steps above 0, each once, in their order"
    if steps and c.batch.per_process_size:
        return "batch.double_at grows to batch.global_size: leave batch.per_process_size out"
    if micro % (first := 2 ** len(steps)):
        return (
            f"batch.double_at has {len(steps)} steps, so microbatches begin with 1/{first} of batch.micro_size={micro} "
            f"samples: make it a multiple of {first}"
        )
    return None


def _two_optimizers(c: Config) -> str | None:
    if c.optimizer.name == "muon" and c.optimizer.target:
        return f"optimizer.name=muon and optimizer._target_={c.optimizer.target} are two optimizers: leave one out"
    return None


def _recompute(c: Config) -> str | None:
    if c.train.recompute != "none" and isinstance(c.model, Own):
        return (
            f"train.recompute={c.train.recompute} knows only this package's models: set it to none, and call "
            f"torch.utils.checkpoint in your own one (use_reentrant=False)"
        )
    return None


def _loss_rows(c: Config) -> str | None:
    if c.train.loss_rows and isinstance(c.model, Own):
        return f"train.loss_rows={c.train.loss_rows} knows only this package's models: set it to 0"
    return None


def _backend(c: Config) -> str | None:
    if c.world.backend == "nccl" and c.world.device == "cpu":
        return "world.backend=nccl needs GPUs, but world.device=cpu: use world.backend=gloo"
    return None


def _tf32(c: Config) -> str | None:
    if c.precision == "tf32" and c.world.device == "cpu":
        return "precision=tf32 is what GPUs have, but world.device=cpu: use precision=fp32"
    return None


def _fa3(c: Config) -> str | None:
    if c.train.attention != "fa3":
        return None
    if c.world.device == "cpu":
        return "train.attention=fa3 needs a GPU, but world.device=cpu: use train.attention=torch"
    if c.precision not in ("bf16", "fp16"):
        return f"train.attention=fa3 computes in bf16 or fp16, not in precision={c.precision}: set precision=bf16"
    if getattr(c.model, "dropout", 0):
        return "train.attention=fa3 has no dropout: set model.dropout=0"
    return None


def _tracker(name: str, trains: bool, c: Config) -> str | None:
    if trains and not installed(name):
        return f"track={name}: its package is not installed: {install(name)}"
    if name in PLACES and not names_a_disk(c.run.dir) and not any(map(os.environ.get, PLACES[name])):
        return f"track={name} can't write to a run.dir in a bucket: set {' or '.join(PLACES[name])} in the environment"
    if trains and name == "wandb" and os.environ.get("RANK", "0") == "0" and not _wandb_key():
        return "track=wandb: W&B has no key here: set WANDB_API_KEY, or WANDB_MODE=offline, in the environment"
    return None


def _wandb_key() -> bool:
    """Whether there is a trace of a key where W&B looks for it, or it needs none.

    To ask itself takes seconds, and starts threads.
    """
    value = os.environ.get
    if value("WANDB_API_KEY") or value("WANDB_IDENTITY_TOKEN_FILE") or value("WANDB_MODE", "online") != "online":
        return True
    for place in (
        value("NETRC", "~/.netrc"),
        f"{value('WANDB_CONFIG_DIR', '~/.config/wandb')}/settings",
        "wandb/settings",
    ):
        with suppress(OSError):
            if re.search("wandb|mode|api_key", Path(os.path.expanduser(place)).read_text(errors="replace")):
                return True
    return False


def _store(key: str, url: str) -> Check:
    """A place in a store that SkyPilot alone knows by this scheme."""
    scheme, _, rest = url.partition("://")
    endpoint = S3_ENDPOINTS.get(scheme)
    bucket = rest.partition("/")[2] if scheme == "cos" else rest  # cos://REGION/BUCKET
    problem = f"{key}={url}: write s3://{bucket}, and set AWS_ENDPOINT_URL={endpoint} in the environment"
    return Check((key,), lambda _: problem if endpoint else None)


def _webhook(c: Config) -> str | None:
    try:
        url = urlsplit(c.health.notify or "https://none")
        good = url.scheme in ("http", "https") and url.hostname and (url.port or 1) and url.geturl().isprintable()
    except ValueError:
        good = False
    if good and not re.search(r"\s", c.health.notify or ""):
        return None
    return "health.notify=***: this is not the address of a webhook: give one that begins with https:// or http://"


def _profile(c: Config) -> str | None:
    try:
        if c.profile.steps is not None:
            steps_to_profile(c.profile.steps)
    except ValueError:
        return f"profile.steps={c.profile.steps}: give FIRST:END: 100:103 are steps 100, 101 and 102"
    return None


def _own(section: str, settings: Section) -> Check:
    """The code of the user's own that a section names: it can be imported, and takes the arguments that are there."""

    def problem(c: Config) -> str | None:
        # Such code imports torch. recipes/setup.sh judges the config before torch is there, and once more after.
        if not isinstance(settings, Own) or not installed("torch"):
            return None
        return plugin.problem(section, settings, c.train.max_steps)

    return Check((f"{section}._target_",), problem)


def _part(key: str, part: Data) -> Check:
    """What a part of the data, such as data.mix.web, forbids."""

    def problem(c: Config) -> str | None:
        text = part.problem()
        return text and of_part(key, part, text)

    return Check(tuple(of_part(key, part, name) for name in part.reads), problem)


def impossible(config: Config, world_size: int, wrong: set[str], trains: bool = True) -> Iterator[str]:
    """One problem for each combination that cannot be.

    wrong: keys whose values are replaced by defaults already. trains: see compose.configure.
    """
    checks = (
        _own("model", config.model),
        _own("data", config.data),
        _own("optimizer", config.optimizer),
        _own("schedule", config.schedule),
        *(_own("observers", observer) for observer in config.observers),
        Check(config.data.reads, lambda c: c.data.problem()),
        *(_part(key, part) for key, part in config.data.parts().items()),
        Check(config.model.reads, lambda c: c.model.problem()),
        Check(("batch.global_size", "batch.micro_size", "batch.per_process_size"), partial(_microbatches, world_size)),
        Check(("batch.double_at", "batch.micro_size", "batch.per_process_size"), _doubling),
        Check(("schedule.cooldown_steps", "schedule.decay_steps"), _cooldown),
        Check(("optimizer.name", "optimizer._target_"), _two_optimizers),
        Check(("train.recompute",), _recompute),
        Check(("train.loss_rows",), _loss_rows),
        Check(("world.backend", "world.device"), _backend),
        Check(("precision", "world.device"), _tf32),
        Check(("train.attention", "precision", "model.dropout", "world.device"), _fa3),
        Check(("health.notify",), _webhook),
        Check(("profile.steps",), _profile),
        *(_store(key, url) for key, url in {"run.dir": config.run.dir, **config.data.places()}.items()),
        *(Check(("track", "run.dir"), partial(_tracker, name, trains)) for name in config.track or ()),
    )
    for check in checks:
        if not wrong.intersection(check.reads) and (problem := check.problem(config)):
            yield problem


def no_weights(url: str) -> str:
    """What to say of a model.init_from without a config.json."""
    shown = f"model.init_from={url}: there is no config.json"
    if Path(url, "snapshots").is_dir() or Path(url, "manifest.json").exists():
        return f"{shown}, but a run of ours: export it first: mingpt export {url} FOLDER"
    known = re.fullmatch(r"(?:openai-community/)?(gpt2(-medium|-large|-xl)?|distilgpt2)", url)
    cure = f", or the hub's: hf://openai-community/{known[1]}" if known else ""
    return f"{shown}: give a folder in Hugging Face's form, as save_pretrained writes it{cure}"


def missing_places(c: Config, problems: Sequence[str]) -> list[str]:
    """Local places that are not there, but those that `problems` tell of, to complete that list.

    They are looked for when they are needed, and one start is to find all.
    """
    named_keys = {re.split("[:=]", problem, maxsplit=1)[0] for problem in problems}
    missing: list[str] = []
    for key, url in c.data.places().items():
        named = key.rpartition(".")[2] in HUB_KEYS and hub.model_at(url)
        if "://" not in url and not named and not Path(url).exists():
            missing.append(f"{key}={url}: there is no such file or bucket: check the spelling{fetch_it(url)}")
    weights = getattr(c.model, "init_from", None)
    if weights and "://" not in weights and not hub.model_at(weights) and not Path(weights, "config.json").exists():
        missing.append(no_weights(weights))
    return [problem for problem in missing if problem.partition("=")[0] not in named_keys]
