"""What a store, a cache cleaner or a racing attempt can do to a start: each has its own clear end."""

import asyncio
import errno
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import aiohttp
import botocore.exceptions
import numpy as np
import pytest

from mingpt.config.schema import WorldConfig
from mingpt.data.text import TextData, open_text
from mingpt.errors import TransientError, UserError
from mingpt.snapshot.find import find
from mingpt.snapshot.store import Store
from mingpt.storage import place
from mingpt.train.attempt import report_failure
from mingpt.world.failures import classify
from mingpt.world.joining import join
from mingpt.world.lifetime import Lifetime, Phase
from told import Told


def test_a_web_server_that_says_no_is_a_mistake_that_names_data_path(tmp_path: Path) -> None:
    class Forbidden(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forbidden)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/x.txt"
        with pytest.raises(UserError, match=r"^data\.path="):
            open_text(TextData(path=url, cache_dir=str(tmp_path)), 4)
    finally:
        server.shutdown()
        server.server_close()


def test_tokens_that_a_cache_cleaner_removed_are_built_anew(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("to be or not to be")
    config = TextData(path=str(tmp_path / "x.txt"), cache_dir=str(tmp_path / "cache"), val_fraction=0.0)
    open_text(config, 4)
    next((tmp_path / "cache").glob("*.npy")).unlink()
    open_text(config, 4)
    assert np.load(next((tmp_path / "cache").glob("*.npy"))).shape == (18,)


def test_a_store_is_shown_without_its_secrets() -> None:
    assert Store("memory://user:password@runs/").url == "memory://***@runs"
    with pytest.raises(UserError, match=r"^memory://\*\*\*@nowhere: "):
        find("memory://user:password@nowhere")


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
        (OSError(errno.ELOOP, "Too many levels of symbolic links"), UserError),
        (PermissionError("403"), UserError),
        (botocore.exceptions.NoCredentialsError(), UserError),
        (botocore.exceptions.EndpointConnectionError(endpoint_url=SECRET), TransientError),
        (OSError(errno.EIO, "Input/output error"), TransientError),
        (ConnectionResetError("reset"), TransientError),
        (missing(asyncio.TimeoutError()), TransientError),
        (missing(aiohttp.ServerDisconnectedError()), TransientError),
        (missing(aiohttp.InvalidURL("http://")), UserError),
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


def test_how_an_attempt_ends_whose_place_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert classify(KeyboardInterrupt(), Phase.TRAINING).reason == "KeyboardInterrupt"
    failure = classify(TransientError("data.path=x: down: try again"), Phase.STARTING)
    assert (failure.code, failure.trace) == (70, False)
    assert report_failure(OSError(f"no answer from {SECRET}"), Lifetime()) == 70
    told = capsys.readouterr().err
    assert told.count("http://host/a?***\n") == 2
    assert "s3cret" not in told


STARTED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "0"}


def problems(monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[str]:
    """What is wrong with an environment, before anything is waited for."""
    for name, value in (STARTED | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught, join(WorldConfig(device="cpu")):
        pass
    return list(caught.value.problems)


@pytest.mark.parametrize(
    "wrong", ["WORLD_SIZE=two", "WORLD_SIZE=0", "RANK=2", "RANK=-1", "MASTER_PORT=99999", "LOCAL_RANK=x"]
)
def test_numbers_that_a_person_set_wrong_are_told_by_name(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    name, value = wrong.split("=")
    assert problems(monkeypatch, **{name: value})[0].startswith(f"{wrong} in the environment: ")


@pytest.mark.parametrize("empty", ["MASTER_ADDR", "MASTER_PORT"])
def test_all_that_a_person_set_wrong_is_told_at_once_and_empty_is_missing(
    monkeypatch: pytest.MonkeyPatch, empty: str, told: Told
) -> None:
    wrong = {"RANK": "x", "MASTER_PORT": "z", "LOCAL_RANK": "y"}
    told("\n".join(problems(monkeypatch, **(wrong | {empty: " "}))))


@pytest.mark.parametrize(("launcher", "error"), [("x", TransientError), (None, UserError)])
def test_a_port_that_is_taken_is_tried_again_only_if_the_launcher_chose_it(
    monkeypatch: pytest.MonkeyPatch, launcher: str | None, error: type[Exception], told: Told
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = str(there.getsockname()[1])
        for name, value in (STARTED | {"RANK": "0", "MASTER_PORT": port}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        if launcher:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", launcher)
        with pytest.raises(error) as caught, join(WorldConfig(device="cpu", init_timeout_seconds=20)):
            pass
    told(str(caught.value), port)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_password_in_a_buckets_url_is_refused_and_not_shown(scheme: str) -> None:
    with pytest.raises(UserError) as caught:
        Store(f"{scheme}://me:hunter2@bucket/run")
    assert str(caught.value).startswith(f"snapshot.dir={scheme}://***@bucket/run: ")
    assert "hunter2" not in str(caught.value)


def test_ctrl_c_ends_the_snapshots_command_without_a_stack_trace(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(600)
        env = {
            **os.environ,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            **{"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"},
        }
        command = [sys.executable, "-m", "mingpt.snapshots", "list", "s3://bucket/run"]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            connection, _ = silent.accept()  # it waits for an answer now
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=600)
            connection.close()
    assert (process.returncode, output) == (130, "")
