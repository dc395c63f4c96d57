"""Each node's cache of prepared data: an array to memory-map, and JSON about it, made by one process for all."""

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from mingpt.atomic import write_whole
from mingpt.console import say
from mingpt.data.kinds.files import CachedData
from mingpt.errors import UserError
from mingpt.storage import place

Cached = tuple[NDArray[Any], dict[str, Any]]  # the array, and what else is known of the data: plain JSON


@contextmanager
def node_lock(lock: Path, seconds: float) -> Iterator[None]:
    """Let one process of this node in at a time. Raises UserError after so many seconds of waiting."""
    try:
        with FileLock(lock, timeout=seconds):
            yield
    except Timeout:
        raise UserError(
            f"another process of this node has been reading data.path for {seconds:.0f} s (lock {lock}): if it is "
            "alive, raise data.cache_timeout_seconds"
        ) from None


def cached(config: CachedData, identity: list[Any], make: Callable[[], Cached]) -> tuple[Path, dict[str, Any]]:
    """The .npy file and the JSON that `make` returns. The first process of the node calls it; the others read the file.

    identity: all that the result depends on. Its first entry, the kind of data, begins the file's name.
    Raises UserError if data.cache_dir can't be used, or another process has held its lock for too long.
    """
    folder = Path(config.cache_dir).expanduser()
    name = sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:32]
    stem = folder / f"{identity[0]}-{name}"
    array, about = stem.with_suffix(".npy"), stem.with_suffix(".json")
    with place("data.cache_dir", str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        with node_lock(stem.with_suffix(".lock"), config.cache_timeout_seconds):
            known = _known(array, about)
            if known is None:
                made, known = make()
                content = np.ascontiguousarray(made)
                head = io.BytesIO()  # as np.save writes it, whole or not at all, without a copy of the array in memory
                np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(content))
                write_whole(array, [head.getvalue(), content.data.cast("B")])
                # Written last: it commits the array.
                write_whole(about, [json.dumps({"array": _hash_of(array), "known": known}).encode()])
        return array, known


def _known(array: Path, about: Path) -> dict[str, Any] | None:
    """The JSON about a cached array; None if either file is missing or damaged, as a power cut may leave them."""
    if not (about.exists() and array.exists()):
        return None
    with suppress(ValueError, KeyError, TypeError):
        stored = json.loads(about.read_text())
        if stored["array"] == _hash_of(array):
            return dict(stored["known"])
    say(f"data.cache_dir={about.parent}: {array.name} or {about.name} is damaged: both are made again")
    return None


def _hash_of(path: Path) -> str:
    return sha256(np.memmap(path, mode="r").data).hexdigest()
