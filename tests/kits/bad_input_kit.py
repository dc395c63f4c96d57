"""What test_bad_input.py's table is made of: a case, the scene it is played in, and what makes a scene bad."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from node_kit import Node, free_port, listening, wait_until
from run_kit import TINY
from snapshot_kit import signed

BOTH = ("train", "launch")
LIMIT = 280  # seconds for one command, however bad its input is: less than any limit of torch's own

# Root reads files of mode 0 because of these capabilities; without them it is told no like anybody else.
AS_ANYBODY = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


@dataclass
class Scene:
    """One run, to be started with something wrong in it. The functions below spoil it."""

    dir: Path
    form: str  # "train" or "launch"
    snapshots: Path  # of a good run, to be copied
    s3: Callable[[str], str]  # the URL of an S3 server of a kind
    overrides: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=lambda: ["--nproc-per-node=2"])  # of mingpt.launch
    env: dict[str, str] = field(default_factory=dict)
    prefix: list[str] = field(default_factory=list)  # what the command is run by
    during: ExitStack = field(default_factory=ExitStack)  # what must be there while it runs

    @property
    def text(self) -> Path:
        return self.dir / "text.txt"

    def command(self) -> list[str]:
        module = ["-m", f"mingpt.{self.form}", *(self.options if self.form == "launch" else ())]
        places = [
            f"run.dir={self.dir}/run",
            f"data.path={self.text}",
            f"data.cache_dir={self.dir}/cache",
            "train.max_steps=6",
            "snapshot.every_steps=2",
            "launch.max_attempts_without_progress=1",
        ]
        # A later override of a key wins, so a case may say any of these again.
        return [*self.prefix, sys.executable, *module, *TINY, *places, *self.overrides]


Spoil = Callable[[Scene], None]


@dataclass(frozen=True)
class Case:
    """A bad input: what makes it, the exit code it must end with, and what must be said.

    where: names the key or the place. cure: says what to do. Both must be in the last thing that is said.
    workers: whether mingpt.launch may start any before it finds the mistake.
    """

    name: str
    where: str
    cure: str
    overrides: tuple[str, ...] = ()
    spoil: tuple[Spoil, ...] = ()
    code: int = 64
    forms: tuple[str, ...] = BOTH
    workers: bool = False
    also: tuple[str, ...] = ()  # more that must be said, before or in the last words
    once: bool = True  # all processes find the same, and one of them tells it


@dataclass(frozen=True)
class Result:
    code: int
    output: str
    workers: bool  # whether a worker was ever seen
    seconds: float

    @property
    def last_words(self) -> str:
        """The last thing said: launch's last line, or what follows the last `error:`; a list of problems is one."""
        return re.split(r"^(?=error: |launch: exit code )", self.output, flags=re.M)[-1]


def play(case: Case, scene: Scene) -> Result:
    """Run the command; fails if it takes too long or leaves a process behind."""
    scene.overrides += [o.format(dir=scene.dir) for o in case.overrides]
    workers = False
    began = time.monotonic()
    with scene.during:
        for spoil in case.spoil:
            spoil(scene)
        node = Node(scene.command(), env=scene.env)
        while node.process.poll() is None and time.monotonic() - began < LIMIT:
            workers = workers or bool(node.workers())
            time.sleep(0.1)
        code = node.wait(max(0.1, LIMIT - (time.monotonic() - began)))
        node.assert_nothing_left()
    return Result(code, node.output, workers, time.monotonic() - began)


def text(content: bytes) -> Spoil:
    return lambda scene: void(scene.text.write_bytes(content))


def env(**variables: str) -> Spoil:
    return lambda scene: scene.env.update(variables)


def options(*values: str) -> Spoil:
    """mingpt.launch's, in place of the usual ones."""
    return lambda scene: void(scene.options.__setitem__(slice(None), values))


def folder(name: str, mode: int = 0o755) -> Spoil:
    def make(scene: Scene) -> None:
        (scene.dir / name).mkdir(parents=True)
        (scene.dir / name).chmod(mode)

    return make


def file(name: str, content: bytes) -> Spoil:
    return lambda scene: void((scene.dir / name).write_bytes(content))


def mode(name: str, bits: int) -> Spoil:
    return lambda scene: (scene.dir / name).chmod(bits)


def link(name: str, target: str) -> Spoil:
    return lambda scene: (scene.dir / name).symlink_to(target)


def fifo(name: str) -> Spoil:
    return lambda scene: os.mkfifo(scene.dir / name)


def void(_: object) -> None:
    """For functions that shall return nothing."""


def as_anybody(scene: Scene) -> None:
    if AS_ANYBODY and not shutil.which("setpriv"):
        pytest.skip("root without setpriv (util-linux) may read and write everything")
    scene.prefix += AS_ANYBODY


def mounted(name: str, tmpfs_options: str) -> Spoil:
    """A small file system on a folder, which only this command sees and which ends with it."""

    def mount(scene: Scene) -> None:
        where = scene.dir / name
        where.mkdir(exist_ok=True)
        if not shutil.which("unshare") or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
            pytest.skip("only root (and not in every container) can mount a small disk of its own")
        script = f'mount -t tmpfs -o {tmpfs_options} tmpfs {where} && exec "$@"'
        scene.prefix += ["unshare", "-m", "bash", "-c", script, "bash"]

    return mount


def ulimit(what: str, value: int) -> Spoil:
    script = f'ulimit {what} {value} && exec "$@"'
    return lambda scene: scene.prefix.extend(["bash", "-c", script, "bash"])


@contextmanager
def listening_socket(port: int) -> Iterator[int]:
    """Something that takes connections and never says a word."""
    with socket.socket() as s:
        s.bind(("", port))
        s.listen()
        yield s.getsockname()[1]


def with_port(variables: Mapping[str, str] = {}, *, busy: bool) -> Callable[..., Spoil]:
    """For launch options and environment in which `{port}` is a port of this machine: busy, or closed."""

    def make(*launch_options: str) -> Spoil:
        def spoil(scene: Scene) -> None:
            port = scene.during.enter_context(listening_socket(0)) if busy else free_port()
            if launch_options:
                scene.options[:] = [o.format(port=port) for o in launch_options]
            scene.env |= {k: v.format(port=port) for k, v in variables.items()}

        return spoil

    return make


def snapshots(scene: Scene) -> None:
    """The run has two good snapshots, of steps 2 and 4, and goes on to step 6."""
    shutil.copytree(scene.snapshots, scene.dir / "run" / "snapshots")


def newest(scene: Scene) -> Path:
    return scene.dir / "run" / "snapshots" / "step-000000004"


def manifest(change: Callable[[bytes], bytes]) -> Spoil:
    """The newest snapshot's manifest is another one."""

    def spoil(scene: Scene) -> None:
        path = newest(scene) / "manifest.json"
        path.write_bytes(change(path.read_bytes()))

    return spoil


def fields(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Spoil:
    """The newest manifest has other fields and a right checksum over them, as an attacker can make it."""
    return manifest(lambda raw: signed(change(json.loads(raw))))


def renamed_part(content: dict[str, Any], name: str) -> dict[str, Any]:
    """A manifest's fields with its first part under another name."""
    old = next(iter(content["parts"]))
    content["parts"][name] = content["parts"].pop(old)
    for tensor in content["tensors"].values():
        tensor["part"] = tensor["part"].replace(old, name)
    return content


def endless(scene: Scene) -> None:
    """The newest manifest seems to be a terabyte long (there is a hole in it)."""
    os.truncate(newest(scene) / "manifest.json", 2**40)


def piped(scene: Scene) -> None:
    """The newest manifest is a pipe that nobody writes to."""
    (newest(scene) / "manifest.json").unlink()
    os.mkfifo(newest(scene) / "manifest.json")


def moved_out(scene: Scene) -> None:
    """The newest snapshot's first part lies outside its folder, and a link leads there."""
    part = min(newest(scene).glob("*.safetensors"))
    outside = scene.dir / "outside"
    part.rename(outside)
    part.symlink_to(outside)


# Kinds of S3 servers: one that knows nobody, so that all credentials are wrong; one that takes everybody; none at all.
STRICT, OPEN, NOTHING = "strict", "open", "nothing"


@contextmanager
def s3_server(kind: str) -> Iterator[str]:
    """The URL of a real S3 server (moto)."""
    port = free_port()
    if kind == NOTHING:
        yield f"http://127.0.0.1:{port}"
        return
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **({"INITIAL_NO_AUTH_ACTION_COUNT": "0"} if kind == STRICT else {})},
    )
    try:
        wait_until(lambda: listening(port) or server.poll() is not None, "moto's server listens")
        assert server.poll() is None, "moto's server has ended"
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def s3(kind: str) -> Spoil:
    """Credentials, and the server that they are shown to."""

    def spoil(scene: Scene) -> None:
        scene.env |= {
            "FSSPEC_S3_ENDPOINT_URL": scene.s3(kind),
            "AWS_ACCESS_KEY_ID": "key-that-nobody-may-see",
            "AWS_SECRET_ACCESS_KEY": "secret-that-nobody-may-see",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",  # the client's own tries take 7 s
        }

    return spoil


def nobody(scene: Scene) -> None:
    """No credentials at all: not in the environment, not in a file, not from a cloud's metadata server."""
    del scene.env["AWS_ACCESS_KEY_ID"], scene.env["AWS_SECRET_ACCESS_KEY"]
    scene.env |= {"HOME": str(scene.dir), "AWS_EC2_METADATA_DISABLED": "true"}
