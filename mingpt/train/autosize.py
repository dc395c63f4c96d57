"""batch.micro_size=auto: as many samples at a time as there is memory for, chosen once for the whole run.

The bits follow from that number. So the run's first start writes it into run.dir before it computes anything, and every
later one takes it from there, whatever machine it is on; or from the newest snapshot, where run.dir is new.
"""

import time
from collections.abc import Iterator

import torch

from mingpt.config.checks import impossible
from mingpt.config.schema import AUTO, Config
from mingpt.console import say
from mingpt.errors import UserError
from mingpt.folder import Folder
from mingpt.redact import without_secrets
from mingpt.snapshot.attempts import make_run_dir
from mingpt.snapshot.reader import manifest_or_none
from mingpt.snapshot.store import Store
from mingpt.train.footprint import changed, footprint, look_at
from mingpt.world.env import Env

NAME = "micro-size"
ROOM = 0.15  # of the memory, which stays free
FEWEST = 8  # microbatches, if global_size has so many: a run can't have more processes


def settled(config: Config, env: Env) -> Config:
    """The config with a number in place of auto. Process 0 chooses; the others wait until they see what it wrote."""
    if config.batch.micro_size != AUTO:
        return config
    number, deadline = _read(config), time.monotonic() + config.world.init_timeout_seconds
    if number is None and not env.rank:
        number = _write(config, _of_snapshot(config) or _choose(config, env))
    while number is None:
        if time.monotonic() > deadline:
            raise UserError(
                f"run.dir={without_secrets(config.run.dir)}: this process does not see {NAME}, which process 0 writes "
                f"there for batch.micro_size=auto: take a folder that all nodes share, or a bucket"
            )
        time.sleep(0.2)
        number = _read(config)
    config = changed(config, "batch.micro_size", number)
    if problems := [*impossible(config, env.size, set())]:
        raise UserError(*problems)
    return config


def _choose(config: Config, env: Env) -> int:
    """The largest power of two that fits; 1 if none does."""
    per_node = env.local_size or env.size
    memory, gpu = _memory(config, env.local_rank, per_node)
    sizes = [*_sizes(config, env.size)]
    for size in sizes:
        candidate = changed(config, "batch.micro_size", size)
        needed = footprint(candidate, look_at(candidate), env.size, per_node).total(gpu)
        if needed <= memory * (1 - ROOM):
            break
    say(
        f"batch.micro_size=auto: {size}, which needs {needed / 1e9:.2f} of {memory / 1e9:.2f} GB; it stays for this run"
    )
    return size


def _sizes(config: Config, processes: int) -> Iterator[int]:
    """Powers of two that divide the batch, the largest first, with room for twice as many processes where possible."""
    whole = config.global_size(processes)
    fewest = max(FEWEST, 2 * processes)
    powers = [1 << n for n in range(whole.bit_length()) if (config.batch.per_process_size or whole) % (1 << n) == 0]
    yield from [p for p in reversed(powers) if whole // p >= fewest] or [1]


def _memory(config: Config, local_rank: int, per_node: int) -> tuple[int, bool]:
    """(bytes that one process may take, whether they are a GPU's)."""
    if config.world.device != "cpu" and torch.cuda.is_available():
        device = local_rank % torch.cuda.device_count()
        return int(torch.cuda.get_device_properties(device).total_memory), True
    import psutil  # for this alone

    return int(psutil.virtual_memory().available // per_node), False


def _of_snapshot(config: Config) -> int | None:
    store = Store(config.snapshot.dir)
    for step in store.steps():
        if (manifest := manifest_or_none(store, step)) is not None:
            batch = manifest.config.get("batch")
            number = batch.get("micro_size") if isinstance(batch, dict) else None
            return number if isinstance(number, int) and number > 0 else None
    return None


def _read(config: Config) -> int | None:
    folder = Folder(config.run.dir)
    raw = folder.read(NAME)
    if raw is None:
        return None
    text = raw.decode(errors="replace").strip()
    if not (text.isdecimal() and len(text) < 10 and int(text)):
        raise UserError(
            f"{without_secrets(folder.path(NAME))} is damaged: write the run's batch.micro_size into it, or delete it"
        )
    return int(text)


def _write(config: Config, number: int) -> int:
    """Write it unless somebody has; returns what is there."""
    make_run_dir(config.run.dir)
    Folder(config.run.dir).create(NAME, f"{number}\n".encode())
    return _read(config) or number
