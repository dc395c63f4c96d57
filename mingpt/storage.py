"""fsspec URLs with errors for people: every place that a user names comes through here."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
from fsspec.implementations.local import LocalFileSystem

from mingpt.config import without_secrets
from mingpt.errors import Mistake

# The extra of this package that brings a scheme's client.
EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "http": "http", "https": "http"}


def open_fs(url: str, key: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a URL and the path inside it. Raises Mistake, naming the config `key`, if there is none."""
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:  # an unknown scheme; a known one whose package is not installed
        scheme = url.partition("://")[0]
        extra = EXTRAS.get(scheme)
        cure = f"pip install 'mingpt[{extra}]'" if extra else "use a local path, s3://…, gs://… or az://…"
        raise Mistake(f"{key}={without_secrets(url)}: {error}: {cure}") from error
    return fs, path


def is_local(fs: fsspec.AbstractFileSystem) -> bool:
    return isinstance(fs, LocalFileSystem)


@contextmanager
def place(key: str, url: str) -> Iterator[None]:
    """Turn what a store says no with (missing, forbidden, wrong credentials) into a Mistake that names the key."""
    shown = f"{key}={without_secrets(url)}"
    try:
        yield
    except FileNotFoundError as error:
        raise Mistake(f"{shown}: there is no such file or bucket") from error
    except PermissionError as error:
        raise Mistake(_denied(shown)) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Mistake(f"{shown}: the disk is full: free some space or choose another place") from error
        if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EROFS, errno.ENAMETOOLONG):
            raise Mistake(f"{shown}: {error.strerror}: choose another place") from error
        raise
    except Exception as error:
        # aiohttp's errors, from http(s) URLs, are no OSErrors and carry a status instead.
        if getattr(error, "status", None) in (401, 403):
            raise Mistake(_denied(shown)) from error
        raise


def _denied(shown: str) -> str:
    return f"{shown}: permission denied: check it, or the credentials in the environment"
