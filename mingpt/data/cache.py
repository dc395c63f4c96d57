"""What a node makes once of data that lies elsewhere: an array to memory-map, and what is known of it."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from mingpt.atomic import write_whole
from mingpt.console import say
from mingpt.data.kinds.files import CachedData
from mingpt.errors import UserError
from mingpt.storage import place

Made = tuple[NDArray[Any], dict[str, Any]]


def _save(path: Path, content: NDArray[Any]) -> None:
    """Write an array so that it is there whole or not at all, without a copy of it in memory."""
    with NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as f:
        try:
            np.save(f, content)
            f.flush()
            os.fsync(f.fileno())
            os.replace(f.name, path)
        except BaseException:
            os.unlink(f.name)
            raise


@contextmanager
def one_at_a_time(config: CachedData, lock: Path) -> Iterator[None]:
    """Of the processes of this node, one is inside at a time. Raises UserError for who waits too long."""
    try:
        with FileLock(lock, timeout=config.cache_timeout_seconds):
            yield
    except Timeout:
        raise UserError(
            f"another process of this node has been reading data.path for {config.cache_timeout_seconds:.0f} s "
            f"(lock {lock}): if it is alive, raise data.cache_timeout_seconds"
        ) from None


def made_once(config: CachedData, identity: list[Any], make: Callable[[], Made]) -> tuple[Path, dict[str, Any]]:
    """The .npy file of what `make` gives and what is known of it, made by whichever process of the node comes first.

    identity: all that the result depends on; its first entry is the kind of data, for people who look into the cache.
    """
    folder = Path(config.cache_dir).expanduser()
    name = sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:32]
    stem = folder / f"{identity[0]}-{name}"
    array, about = stem.with_suffix(".npy"), stem.with_suffix(".json")
    with place("data.cache_dir", str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(config, stem.with_suffix(".lock")):
            known = _known(array, about)
            if known is None:
                content, known = make()
                _save(array, content)
                # Last: its presence says that the array is whole.
                write_whole(about, [json.dumps({"array": _hash_of(array), "known": known}).encode()])
        return array, known


def _known(array: Path, about: Path) -> dict[str, Any] | None:
    """What is known of a whole array; None, and a line about it, if it is not whole: a power cut may have taken it."""
    if not (about.exists() and array.exists()):
        return None
    with suppress(ValueError, KeyError, TypeError):
        noted = json.loads(about.read_text())
        if noted["array"] == _hash_of(array):
            return dict(noted["known"])
    say(f"data.cache_dir={about.parent}: {array.name} or {about.name} is damaged: both are made again")
    return None


def _hash_of(path: Path) -> str:
    digest = sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
