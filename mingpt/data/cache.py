"""What a node makes once of data that lies elsewhere: an array to memory-map, and what is known of it."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from mingpt.config import CachedData
from mingpt.errors import Mistake
from mingpt.storage import place

Made = tuple[NDArray[Any], dict[str, Any]]


def _commit(path: Path, content: bytes | NDArray[Any]) -> None:
    """Write a file of the cache so that it is there whole or not at all."""
    with NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as f:
        try:
            if isinstance(content, bytes):
                f.write(content)
            else:
                np.save(f, content)
            f.flush()
            os.fsync(f.fileno())
            os.replace(f.name, path)
        except BaseException:
            os.unlink(f.name)
            raise


@contextmanager
def one_at_a_time(config: CachedData, lock: Path) -> Iterator[None]:
    """Of the processes of this node, one is inside at a time. Raises Mistake for who waits too long."""
    try:
        with FileLock(lock, timeout=config.cache_timeout_seconds):
            yield
    except Timeout:
        raise Mistake(
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
            if not (about.exists() and array.exists()):
                content, known = make()
                _commit(array, content)
                _commit(about, json.dumps(known).encode())  # last: its presence says that the array is whole
        try:
            return array, json.loads(about.read_text())
        except ValueError as error:
            raise Mistake(f"data.cache_dir={folder}: {about.name} is damaged: delete it") from error
