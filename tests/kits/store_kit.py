"""Real object stores on loopback, each a process that can be killed and started again with the same port.

The address and the credentials travel as users give them, in the environment: to this process's clients and to every
process that a test starts. All secrets hold `nobodymaysee`, for tests that search what was written for them.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import pytest
from _pytest.mark import ParameterSet

from tests.kits.node_kit import free_port, listening, wait_until
from tests.kits.paths_kit import KITS, ROOT

HIDDEN = "nobodymaysee"  # a part of each secret
SECRET_KEY = f"secretthat{HIDDEN}00"  # Azure's keys are base64, as this is
ACCOUNT = "testaccount"
BUCKET = "runs"
START_LIMIT = 300  # seconds
AZURITE = ROOT / ".azurite/node_modules/.bin/azurite-blob"


@dataclass
class Server:
    """One store. The subclasses say how it is started and how clients find it."""

    folder: Path  # where those that have a disk keep their data
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None

    scheme = ""  # of its URLs

    @property
    def url(self) -> str:
        """Of a bucket."""
        return f"{self.scheme}://{BUCKET}"

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self, port: int) -> dict[str, str]:
        """For clients that shall reach it at this port, which is its own or a proxy's."""
        raise NotImplementedError

    def start(self) -> "subprocess.Popen[bytes]":
        command = self.command()
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not installed: make azurite, or pip install -e '.[dev]'")
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            env = os.environ | self.environment(self.port)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        self.process = process
        what = f"{command[0]} listens at {self.port}; {self.folder}/log"
        wait_until(lambda: listening(self.port) or process.poll() is not None, what, START_LIMIT)
        assert process.poll() is None, (self.folder / "log").read_text()
        return process

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_LIMIT)
            self.process = None

    def close(self) -> None:
        """The test has ended."""
        self.kill()

    def make_bucket(self) -> None:
        fsspec.filesystem(self.scheme).mkdir(BUCKET)


class Moto(Server):
    """S3 in memory: what is stored is gone with the process. Has conditional puts."""

    scheme = "s3"

    def command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def environment(self, port: int) -> dict[str, str]:
        return {
            "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": f"key{HIDDEN}",
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@dataclass
class ProxiedMoto(Moto):
    """Moto behind a proxy, which drops the condition of each put. Killed is the proxy: what was stored survives.

    A client sees what it sees of a server with a disk: connections break, the port refuses, then all is there again.
    (Azurite has a disk, and lost a blob that it had acknowledged when it was killed right after.)
    """

    memory: Moto | None = None

    def command(self) -> list[str]:
        assert self.memory
        return [sys.executable, str(KITS / "fault_proxy.py"), str(self.port), str(self.memory.port)]

    def start(self) -> "subprocess.Popen[bytes]":
        if self.memory is None:
            self.memory = Moto(self.folder / "memory")
            self.memory.start()
        return super().start()

    def close(self) -> None:
        super().close()
        if self.memory:
            self.memory.close()


class Azurite(Server):
    """Azure blobs on disk. Has conditional puts. Its index is written every few seconds: a kill loses the last."""

    scheme = "az"

    def command(self) -> list[str]:
        place = ["--location", str(self.folder / "data"), "--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        return [str(AZURITE), "--silent", "--disableTelemetry", "--skipApiVersionCheck", *place]

    def environment(self, port: int) -> dict[str, str]:
        account = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={SECRET_KEY}"
        return {
            "AZURE_STORAGE_CONNECTION_STRING": f"{account};BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT}",
            "AZURITE_ACCOUNTS": f"{ACCOUNT}:{SECRET_KEY}",  # for the server itself
        }


class GoogleEmulator(Server):
    """Google storage on disk, loosely: conditions are ignored, so it serves for smoke tests only."""

    scheme = "gs"

    def command(self) -> list[str]:
        address = ["--host=127.0.0.1", f"--port={self.port}", f"--default-bucket={BUCKET}"]
        return [
            str(Path(sys.executable).with_name("gcp-storage-emulator")),
            f"--data-dir={self.folder / 'data'}",
            "start",
            *address,
        ]

    def environment(self, port: int) -> dict[str, str]:
        return {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
            "FSSPEC_GCS_TOKEN": "anon",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it asks what the emulator doesn't know
        }

    def make_bucket(self) -> None:
        """It starts with one."""


KINDS: dict[str, type[Server]] = {"moto": Moto, "proxied": ProxiedMoto, "azurite": Azurite, "google": GoogleEmulator}


class Stores:
    """The servers of one test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.servers: list[Server] = []

    def __call__(self, kind: str) -> Server:
        """Start one, with an empty bucket, to which all clients go from now on. Skips the test if it isn't there."""
        server = KINDS[kind](self.folder / f"{kind}-{len(self.servers)}")
        self.servers.append(server)
        server.start()
        self.direct_clients(server, server.port)
        server.make_bucket()
        return server

    def direct_clients(self, server: Server, port: int) -> None:
        for name, value in server.environment(port).items():
            self.monkeypatch.setenv(name, value)
        forget_clients()

    def close(self) -> None:
        for server in self.servers:
            server.close()


def forget_clients() -> None:
    """Have this process's next clients made from the environment as it is now, as those of a new process are."""
    for scheme in {server.scheme for server in KINDS.values()} & fsspec.registry.keys():
        fsspec.get_filesystem_class(scheme).clear_instance_cache()
    fsspec.config.conf.clear()
    fsspec.config.set_conf_env(fsspec.config.conf)


def nightly(*kinds: str) -> ParameterSet:
    """Kinds of stores that only `make test-nightly` tries."""
    return pytest.param(*kinds, marks=[pytest.mark.slow, pytest.mark.nightly])
