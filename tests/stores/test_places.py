"""What a store, a cache cleaner or a racing attempt can do to a start: each has its own clear end."""

import asyncio
import errno
import gc
import socket
from typing import Any, cast

import aiohttp
import botocore.exceptions
import pytest

from mingpt.config.schema import WorldConfig
from mingpt.errors import TransientError, UserError
from mingpt.snapshot.reader import find
from mingpt.storage import open_fs, place
from mingpt.train.attempt import report_failure
from mingpt.world.joining import join
from mingpt.world.lifetime import Lifetime
from told import Told


@pytest.mark.parametrize("scheme", ["memory", "s3"])
def test_a_password_in_a_url_is_not_shown_and_in_a_buckets_url_refused(scheme: str) -> None:
    with pytest.raises(UserError, match=rf"(snapshot\.dir=)?{scheme}://\*\*\*@nowhere: ") as caught:
        find(f"{scheme}://me:hunter2@nowhere")
    assert "hunter2" not in str(caught.value)


SECRET = "http://host/a?X-Signature=s3cret"


def missing(behind: BaseException | None) -> FileNotFoundError:
    """What the web client calls missing; the file may be there."""
    error = FileNotFoundError(SECRET)
    error.__cause__ = behind
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), UserError),
        (PermissionError("403"), UserError),
        (aiohttp.ClientResponseError(cast(Any, None), (), status=403), UserError),
        (botocore.exceptions.NoCredentialsError(), UserError),
        (botocore.exceptions.EndpointConnectionError(endpoint_url=SECRET), TransientError),
        (OSError(errno.EIO, "Input/output error"), TransientError),
        (missing(asyncio.TimeoutError()), TransientError),
        (missing(None), UserError),
    ],
    ids=repr,
)
def test_what_a_store_fails_with_names_the_key_and_says_whether_to_try_again(error: Exception, kind: type) -> None:
    # The key is the inner place's, which failed, not that of the place around it.
    with pytest.raises(kind) as caught, place("data.cache_dir", "/cache"), place("data.path", SECRET):
        raise error
    assert type(caught.value) is kind
    assert str(caught.value).startswith("data.path=http://host/a?***: ")
    assert "s3cret" not in str(caught.value)


def test_a_fault_of_ours_keeps_its_stack_trace() -> None:
    with pytest.raises(ValueError, match="ours"), place("data.path", "here"):
        raise ValueError("ours")


def test_a_stack_trace_shows_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_failure(OSError(f"no answer from {SECRET}"), Lifetime()) == 70
    told = capsys.readouterr().err
    assert told.count("http://host/a?***\n") == 2
    assert "s3cret" not in told


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
