"""Open the URLs that a user gives with fsspec, and turn the clients' errors into UserError or TransientError."""

import asyncio
import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from inspect import iscoroutinefunction
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import fsspec
from fsspec.implementations.local import LocalFileSystem

from mingpt.cli.console import complain, printable
from mingpt.errors import TransientError, UserError
from mingpt.files import hub
from mingpt.files.localfile import NotPlain

# By scheme of URL: the extra of this package that installs its client.
EXTRAS = {
    "s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "http": "http", "https": "http", "hf": "hf"
}  # fmt: skip

# Stores that SkyPilot gives schemes of their own, and that speak S3: what AWS_ENDPOINT_URL is there.
S3_ENDPOINTS = {
    "r2": "https://ACCOUNT.r2.cloudflarestorage.com",
    "nebius": "https://storage.REGION.nebius.cloud",
    "oci": "https://NAMESPACE.compat.objectstorage.REGION.oraclecloud.com",
    "cw": "https://cwobject.com",
    "cos": "https://s3.REGION.cloud-object-storage.appdomain.cloud",
}

CLIENTS = {
    "adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "httpx", "httpx2",
    "huggingface_hub", "s3fs", "zlib",
}  # fmt: skip
# The clients' errors for which a retry is useless. (Not CredentialRetrievalError: a metadata server may be busy.)
NO_CREDENTIALS = re.compile(r"(No|Partial|Default)Credentials|ClientAuthentication|ProfileNotFound")
# A store's words for a refusal that passes: a new process reads new credentials, and sends the bytes again. S3 answers
# a HEAD without words: an expired token is a bare 400. The last two are about tokens, too: Azure's and Google's.
PASSING = re.compile(
    r"expired|TokenRefreshRequired|InvalidToken|BadDigest|SHA256Mismatch|IncompleteBody|\(400\)|"
    r"not valid in the specified time frame|Invalid Credentials, 401",
    re.I,
)
FORBIDDEN = "Forbidden: "  # gcsfs has an OSError that begins with it
SILENT = (TimeoutError, asyncio.TimeoutError)  # Python 3.10: two classes
# What clients call it if the bytes that came are not those that were stored.
MISMATCH = re.compile(r"ChecksumError|ContentEncodingError|^zlib\.")
LIMIT, LIMIT_SECONDS = "MINGPT_STORE_SECONDS", 600.0  # environment variable, and its default
# Paths that `mingpt fetch NAME` writes, and the NAME for each.
FETCHED = {
    "data/shakespeare.txt": "shakespeare",
    "data/shakespeare-complete.txt": "shakespeare",
    "data/gpt2": "gpt2-vocabulary",
    "data/mnist": "mnist",
    "data/fashion-mnist": "fashion-mnist",
    "data/cifar-10-batches-bin": "cifar-10",
    "data/fineweb-edu": "fineweb-edu",
    "data/tinystories": "tinystories",
}
FULL = {errno.ENOSPC, errno.EDQUOT}
NEVER = {
    errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.ENXIO
}  # fmt: skip


def install(extra: str) -> str:
    """What brings the packages of an extra, for a message: this package is not on PyPI."""
    return f"pip install -e '.[{extra}]' in the checkout"


def limit_seconds() -> float:
    """The time limit of one call of an object store. Raises UserError for a bad value in the environment."""
    given = os.environ.get(LIMIT, "")
    try:
        seconds = float(given or LIMIT_SECONDS)
    except ValueError:
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{LIMIT}={given} in the environment: give a number of seconds above 0")
    return seconds


@dataclass(frozen=True)
class _Limited:
    """An object store's client with a time limit for each call.

    Without it a server that accepts connections and never answers would block a run for ever. The clients' own limits
    are long, are multiplied by their retries, and have no common option.
    """

    client: fsspec.AbstractFileSystem
    seconds: float

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.client, name)
        is_async = iscoroutinefunction(getattr(value, "__wrapped__", None))  # fsspec's `sync` wraps it: takes a timeout
        return partial(value, timeout=self.seconds) if is_async else value


def open_fs(url: str, key: str) -> tuple[Any, str]:
    """The file system of a URL (an fsspec AbstractFileSystem) and the path inside it.

    On an object store each call has the time limit MINGPT_STORE_SECONDS. Raises UserError, naming the config `key`, for
    a bad URL or a client that is not installed.
    """
    seconds = limit_seconds()
    if re.match(r"(s3a?|gs|gcs)://[^/]*@", url):  # the clients would read it as part of the bucket's name
        raise UserError(
            f"{key}={url}: the URL of a bucket has no user and password: set them in the environment "
            f"(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or GOOGLE_APPLICATION_CREDENTIALS)"
        )
    try:
        _ = urlsplit(url.rpartition("::")[2]).port if "://" in url else None
    except ValueError:  # not chained: its text quotes the port, which may be a password with a `/` in it
        cure = "check the spelling; in a user name or password, write / as %2F"
        raise UserError(f"{key}={url}: this is not a valid address: {cure}") from None
    if getproxies():  # not else: with trust_env aiohttp reads ~/.netrc, too
        for scheme, kwargs in (("http", "client_kwargs"), ("gs", "session_kwargs")):
            fsspec.config.conf.setdefault(scheme, {}).setdefault(kwargs, {}).setdefault("trust_env", True)
    try:
        if url.startswith(hub.SCHEME):
            hub.set_up(seconds)
        with place(key, url):  # some clients connect at once
            fs, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError, TypeError) as error:  # an unknown scheme, no package, a client that asks for more
        scheme = url.partition("://")[0]
        extra = EXTRAS.get(scheme)
        cure = install(extra) if extra else "use a local path, s3://…, gs://… or az://…"
        raise UserError(f"{key}={url}: {words_of(error)}: {cure}") from error
    fs.invalidate_cache()  # fsspec shares clients, with the listings that they have cached
    if (loop := getattr(fs, "loop", None)) is not None:
        loop.set_exception_handler(_helper_failed)
    return (_Limited(fs, seconds) if fs.async_impl else fs), path


def _helper_failed(loop: Any, context: Mapping[str, Any]) -> None:
    """What a client's own task failed with that nobody awaits: one line in place of asyncio's stack trace.

    So fails aiohttp's, which sends a request when the server has just closed the connection; the request itself fails,
    too. What is no trouble with a connection keeps its stack trace.
    """
    error = context.get("exception")
    if isinstance(error, Exception) and (isinstance(error, OSError) or _package(error) in CLIENTS):
        complain(f"a store's client: {type(error).__name__}: {printable(str(error))}")
    else:
        loop.default_exception_handler(context)


def hub_folder(url: str, key: str, files: Sequence[str]) -> str:
    """If the URL names a model of the hub: its folder in the client's cache, with these files; else the URL.

    Raises UserError and TransientError, naming the config `key`.
    """
    if (model := hub.model_at(url)) is None:
        return url
    try:
        hub.set_up(limit_seconds())
    except ImportError as error:
        raise UserError(f"{key}={url}: no folder, and a model of the hub needs {install('hf')}") from error
    with place(key, url):
        return hub.folder_of(*model, files)


def is_local(fs: Any) -> bool:
    return isinstance(fs, LocalFileSystem)


def names_a_disk(url: str) -> bool:
    """Whether a URL or a path names a place on a disk. By its scheme alone: no client of a store is made."""
    return "://" not in url or url.startswith(("file://", "local://"))


def without_query(path: str) -> str:
    """Cut the query off an HTTP URL: it is no part of the name and may hold a signature. Other paths stay."""
    return path.partition("?")[0] if path.startswith(("http://", "https://")) else path


def name_of(path: str) -> str:
    """The last part of a path or URL."""
    return without_query(path).rpartition("/")[2]


def modified(entry: Mapping[str, Any]) -> float | None:
    """The Unix time of an entry of `ls`, whose key differs between clients. None if the store does not report it."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "modified", "created"):
        value = entry.get(key)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
            except ValueError:
                continue
        if isinstance(value, datetime):  # stores report UTC, some without a zone
            return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return None


@contextmanager
def place(key: str, url: str) -> Iterator[None]:
    """Raise what a store fails with as UserError (the user must act) or TransientError (it may pass), with key and URL.

    Other exceptions pass unchanged.
    """
    try:
        yield
    except TransientError:  # from a nested `place`
        raise
    except NotPlain as problem:
        raise UserError(f"{key}={problem.as_problem()}") from problem
    except Exception as error:  # only here: to look for secrets takes longer than to write a record of the trace
        meant = _meant(f"{key}={url}", url, error)
        if meant is None:
            raise
        raise meant from error


def _meant(shown: str, url: str, error: Exception) -> Exception | None:
    error = unmasked(error)
    if isinstance(error, SILENT):
        return TransientError(
            f"{shown}: no answer within {limit_seconds():g} s: look at the network and the address; {LIMIT} in the "
            f"environment sets another limit"
        )
    words = own_words(error)
    if isinstance(error, FileNotFoundError):
        return UserError(_missing(shown, "" if words.startswith("404") else words) + fetch_it(url))
    if PASSING.search(words):
        return _unavailable(shown, error)
    if _package(error) in CLIENTS:
        return _of_client(shown, error)
    if is_denied(error):
        return _denied(shown, words)
    if isinstance(error, OSError):
        if error.errno in FULL:
            return UserError(f"{shown}: the disk is full: free some space or choose another place")
        if error.errno in NEVER:
            return UserError(f"{shown}: {words or error.strerror}: choose another place")
        return _unavailable(shown, error)
    if isinstance(error, NotImplementedError):
        return _read_only(shown)
    if str(error).startswith("Bad Request: "):  # gcsfs has a ValueError for what Google calls invalid
        return UserError(f"{shown}: {_one_line(error)}: check the spelling, or choose another place")
    return None


def unmasked(error: Exception) -> Exception:
    """The error itself, or the one behind it that says more.

    fsspec's HTTP client raises FileNotFoundError also for a server that it can't reach. Then the cause is aiohttp's
    error, or a TimeoutError after aiohttp's own limit of five minutes. adlfs wraps some of its client's errors into a
    RuntimeError or a ValueError.
    """
    cause = error.__cause__
    if not isinstance(cause, Exception):
        return error
    package = _package(cause)
    if isinstance(error, FileNotFoundError):
        web = package == "aiohttp" and _status(cause) not in (404, 410)
        behind = web or package in ("httpx", "httpx2", "huggingface_hub") or isinstance(cause, SILENT)
    else:
        behind = isinstance(error, (RuntimeError, ValueError)) and package in CLIENTS
    return cause if behind else error


def is_denied(error: Exception) -> bool:
    """Whether a disk or a store refuses what was asked of it."""
    return isinstance(error, PermissionError) or str(error).startswith(FORBIDDEN) or _status(error) in (401, 403)


def is_mismatch(error: Exception) -> bool:
    """Whether a client has found that the bytes that came are not those that were stored."""
    return MISMATCH.search(f"{_package(error)}.{type(error).__name__}") is not None


def own_words(error: Exception) -> str:
    """What a store itself says of an error, in one line without secrets; "" if it has said nothing.

    s3fs makes OSErrors of what S3 answers, and sometimes only their context tells of that.
    """
    if str(error).startswith(FORBIDDEN):
        return _one_line(error)
    chain = (error, error.__cause__, error.__context__)
    return _one_line(next((e for e in chain if isinstance(e, Exception) and _package(e) in CLIENTS), ""))


def words_of(error: Exception) -> str:
    """What to say of an error, in one line without secrets: a store's own words, if there are some."""
    return own_words(error) or _one_line(error) or type(error).__name__


def _one_line(what: object) -> str:
    return printable("; ".join(str(what).strip().splitlines()))


def may_pass(error: Exception) -> bool:
    """Whether a store may answer the next try. Not one that has kept silent for as long as a call may take."""
    error = unmasked(error)
    lasting = isinstance(error, (FileNotFoundError, *SILENT)) or is_denied(error)
    return not lasting and (isinstance(error, OSError) or _package(error) in CLIENTS)


def unread(error: Exception) -> bool:
    """Whether the disk failed, or a store: then the content of the file that was read may be fine."""
    return isinstance(error, OSError) and (error.errno is not None or _package(error) in CLIENTS)


def _package(error: Exception) -> str:
    return type(error).__module__.partition(".")[0]


def _status(error: Exception) -> object:
    """The HTTP status: of aiohttp's errors, gcsfs', Azure's, or the Hugging Face hub's."""
    own = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next(filter(None, own), None) or getattr(getattr(error, "response", None), "status_code", None)


def _of_client(shown: str, error: Exception) -> UserError | TransientError:
    if re.match(r"(Repository|Revision|\w*Entry)NotFound", name := type(error).__name__):
        return UserError(f"{shown}: not there, or private: check the spelling, or set HF_TOKEN in the environment")
    if name == "GatedRepoError":
        return UserError(f"{shown}: gated: accept its terms on its page, and set HF_TOKEN in the environment")
    if name == "OfflineModeIsEnabled":
        return UserError(f"{shown}: not in the cache, and HF_HUB_OFFLINE is set: unset it once, or `hf download` it")
    if is_denied(error) or NO_CREDENTIALS.search(name):
        return _denied(shown, own_words(error))
    if name == "ResourceNotFoundError":  # Azure's, for a container
        return UserError(_missing(shown, own_words(error)))
    if _status(error) in (405, 501):  # a web server that does not support PUT
        return _read_only(shown)
    if re.match(r"InvalidU(rl|RL)|HFValidation", name):
        return UserError(f"{shown}: this is not a valid address: check the spelling")
    return _unavailable(shown, error)


def fetched_as(path: str) -> str | None:
    """The NAME of `mingpt fetch NAME` that writes this path."""
    path = os.path.relpath(path or ".")
    return next((name for place, name in FETCHED.items() if path == place or path.startswith(f"{place}/")), None)


def fetch_it(url: str) -> str:
    """The end of a message about a missing file: how to fetch it, if `mingpt fetch` can."""
    name = fetched_as(url)
    return f", or get it with `mingpt fetch {name}`" if name else ""


def _missing(shown: str, words: str) -> str:
    return f"{shown}: there is no such file or bucket{words and f' ({words})'}: check the spelling"


def _read_only(shown: str) -> UserError:
    return UserError(f"{shown}: this place can only be read: choose another")


def _denied(shown: str, words: str) -> UserError:
    which = "HF_TOKEN" if hub.SCHEME in shown else "the credentials"
    credentials = f", or {which} in the environment" if "://" in shown else ""
    return UserError(f"{shown}: permission denied{words and f' ({words})'}: check it{credentials}")


def _unavailable(shown: str, error: Exception) -> TransientError:
    return TransientError(
        f"{shown}: {words_of(error)}: try again; if it stays so, look at the disk, the network and the address"
    )
