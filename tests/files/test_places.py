"""What a store, a cache cleaner or a racing attempt can do to a start: each has its own clear end."""

import asyncio
import errno
import gc
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import botocore.exceptions
import pytest
from azure.core.exceptions import ClientAuthenticationError, HttpResponseError
from botocore.exceptions import ClientError
from gcsfs.retry import HttpError
from s3fs.errors import translate_boto_error

from mingpt.cli.redact import redacted
from mingpt.config.schema import WorldConfig
from mingpt.errors import TransientError, Unreadable, UserError
from mingpt.files.folder import Folder
from mingpt.files.storage import open_fs, place
from mingpt.snapshot.store import Store
from mingpt.world.joining import join
from tests.kits.store_kit import GoogleEmulator, forget_clients
from tests.kits.told import Told
from tests.kits.web_kit import Quiet, serving


def test_a_password_in_a_buckets_url_is_refused_and_not_shown() -> None:
    with pytest.raises(UserError) as caught:
        open_fs("s3://me:hunter2@nowhere", "data.path")
    assert redacted(str(caught.value)).startswith("data.path=s3://***@nowhere: the URL of a bucket has no user")


SECRET = "http://host/a?X-Signature=s3cret"


def missing(behind: BaseException | None) -> FileNotFoundError:
    """What the web client calls missing; the file may be there."""
    error = FileNotFoundError(SECRET)
    error.__cause__ = behind
    return error


def test_a_file_that_alone_cant_be_read_is_named_without_secrets() -> None:
    folder = Folder("memory://places")
    folder.write("good", b"1")
    wrapped = RuntimeError("adlfs")
    wrapped.__cause__ = HttpResponseError(SECRET)
    with pytest.raises(Unreadable) as caught:
        folder.raise_unreadable("bad", wrapped)
    shown = redacted(str(caught.value))
    assert shown.startswith("run.dir=memory://places: bad: others in there can be read: ")
    assert "s3cret" not in shown


def s3(code: str, message: str) -> Exception:
    """As s3fs raises what S3 answers."""
    return translate_boto_error(ClientError({"Error": {"Code": code, "Message": message}}, "PutObject"))


def azure(detail: str) -> Exception:
    """What Azure refuses, as its client raises it."""
    error = ClientAuthenticationError(
        f"Server failed to authenticate the request.\nRequestId:1\nErrorCode:AuthenticationFailed\ndetail:{detail}"
    )
    error.status_code = 403
    return error


def wrapped(error: Exception) -> Exception:
    """As adlfs wraps what it fails with while it uploads."""
    outer = RuntimeError(f"Failed to upload block: {error}!")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), UserError, ""),
        (PermissionError("403"), UserError, ""),
        (aiohttp.ClientResponseError(cast(Any, SimpleNamespace(real_url=SECRET)), (), status=403), UserError, ""),
        (botocore.exceptions.NoCredentialsError(), UserError, ""),
        (botocore.exceptions.EndpointConnectionError(endpoint_url=SECRET), TransientError, ""),
        (OSError(errno.EIO, "Input/output error"), TransientError, ""),
        (missing(asyncio.TimeoutError()), TransientError, ""),
        (missing(None), UserError, ""),
        # A store's own words are kept, and what passes is tried again.
        (s3("ExpiredToken", "The provided token has expired."), TransientError, "(ExpiredToken) when"),
        (s3("InvalidToken", "The provided token is malformed."), TransientError, "(InvalidToken) when"),
        (s3("BadDigest", "The CRC32 you specified did not match."), TransientError, "(BadDigest) when"),
        (s3("400", "Bad Request"), TransientError, "(400) when"),
        (s3("AccessDenied", "No identity-based policy allows it"), UserError, "(AccessDenied) when"),
        (s3("InvalidBucketName", "The bucket is not valid."), UserError, "(InvalidBucketName) when"),
        (s3("NoSuchBucket", "The bucket does not exist"), UserError, "(NoSuchBucket) when"),
        (
            wrapped(azure("Signature not valid in the specified time frame: Start [a] - Expiry [b]")),
            TransientError,
            "AuthenticationFailed; detail:Signature not valid",
        ),
        (azure("Signature did not match."), UserError, "detail:Signature did not match."),
        (HttpError({"code": 401, "message": "Invalid Credentials"}), TransientError, "Invalid Credentials, 401"),
        (HttpError({"code": 401, "message": "Anonymous caller has no access"}), UserError, "Anonymous caller"),
        (OSError("Forbidden: b/o\nme does not have storage.objects.get"), UserError, "me does not have storage.obj"),
        (ValueError("Bad Request: b/o\ninvalid name"), UserError, "invalid name"),
    ],
    ids=repr,
)  # fmt: skip
def test_what_a_store_fails_with_names_the_key_and_says_whether_to_try_again(
    error: Exception, kind: type, words: str
) -> None:
    # The key is the inner place's, which failed, not that of the place around it.
    with pytest.raises(kind) as caught, place("data.cache_dir", "/cache"), place("data.path", SECRET):
        raise error
    assert type(caught.value) is kind
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    shown = redacted(message)
    assert shown.startswith("data.path=http://host/a?***: ")
    assert "s3cret" not in shown


class Proxy(Quiet):
    """Answers what is asked of it, whatever the server. Google's is asked for listings alone."""

    def do_GET(self) -> None:
        body = b'{"items": []}' if "google" in self.path else b"To be"
        self.send_response(404 if "/o/" in self.path else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET


def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As curl, pip and boto do. No server has a name in .invalid."""
    for name, value in GoogleEmulator(Path()).environment(0).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://google.invalid")
    forget_clients()
    try:
        with pytest.raises(TransientError, match=r"http://web\.invalid"):
            Folder("http://web.invalid/run").entries()
        with serving(Proxy) as url:
            monkeypatch.setenv("http_proxy", url)
            fs, path = open_fs("http://web.invalid/text.txt", "data.path")
            assert fs.cat_file(path) == b"To be"
            assert Store("gs://bucket/run").steps() == []
            fs, path = open_fs("simplecache::http://web.invalid/text.txt", "data.path")
            assert fs.cat_file(path) == b"To be"
    finally:
        monkeypatch.undo()
        forget_clients()


def test_a_fault_of_ours_keeps_its_stack_trace() -> None:
    with pytest.raises(ValueError, match="ours"), place("data.path", "here"):
        raise ValueError("ours")


def test_a_clients_task_that_nobody_awaits_fails_in_one_line(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    fs, _ = open_fs("http://localhost:1/x", "data.sources.text")

    async def helper(error: Exception) -> None:
        raise error

    async def start() -> None:
        gone = aiohttp.ClientConnectionResetError("closing\nhttp://u:hidden@host/?sig=hidden")
        await asyncio.wait([asyncio.create_task(helper(e)) for e in (gone, ZeroDivisionError("a fault"))])
        gc.collect()  # asyncio asks its handler when the task goes

    asyncio.run_coroutine_threadsafe(start(), fs.loop).result(60)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), fs.loop).result(60)
    told = capsys.readouterr().err
    assert told.startswith("a store's client: ClientConnectionResetError: closing\\nhttp://")
    assert told.count("\n") == 1
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]
    assert "hidden" not in told


def test_a_port_that_is_taken_is_tried_again_if_the_launcher_chose_it(
    monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        place = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port} RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 TORCHELASTIC_RUN_ID=x"
        for variable in place.split():
            monkeypatch.setenv(*variable.split("="))
        with told.mistake(port, of=TransientError), join(WorldConfig(device="cpu", init_timeout_seconds=20)):
            pass


@pytest.mark.parametrize("url", ["zip://runs", "jlab://runs"])
def test_what_a_client_fails_with_while_it_is_made_is_a_mistake(url: str) -> None:
    """A path that is no archive; an address that this client needs as an option of its own."""
    with pytest.raises(UserError, match=f"^snapshot.dir={url}: "):
        open_fs(url, "snapshot.dir")
