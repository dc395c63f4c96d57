"""What several files of this room try: a disk that can't read a file any more."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has each try to read this file fail with this error."""

    def fail(path: Path, number: int = errno.EIO) -> None:
        bad, real = path.stat().st_ino, os.fdopen

        def opened(descriptor: int, mode: str = "r") -> Any:
            if os.fstat(descriptor).st_ino == bad:
                raise OSError(number, os.strerror(number))
            return real(descriptor, mode)

        monkeypatch.setattr(os, "fdopen", opened)
        monkeypatch.setattr("mingpt.files.localfile.PAUSES", (0.0, 0.0))

    return fail
