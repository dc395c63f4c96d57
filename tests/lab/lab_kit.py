"""Helpers for tests in the lab: commands of its users, its hosts and its nodes' network cards."""

import ctypes
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.server import MotoRequestHandler
from werkzeug.serving import make_server

from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests/lab"
LAB = Path(os.environ.get("LAB", "/var/lib/mingpt-lab"))
USER, USER_ID = "mguser", 4242
HOME = LAB / "home" / USER  # all nodes see it, and so do the tests

needs_lab = pytest.mark.skipif(not (LAB / "run/ctl.pid").exists(), reason="the lab is not up: make lab-up")

# The recipes' own experiment, small enough for 16 processes on a laptop's cores. 16 microbatches, as ever; not in bf16,
# which CPUs emulate.
SMALL = (
    "precision=fp32",
    "batch.global_size=64",
    "batch.micro_size=4",
    "model.n_layer=2",
    "model.n_embd=48",
    "model.block_size=32",
    "train.max_steps=24",
    "train.log_every=1",
    "snapshot.every_steps=8",
    "snapshot.hot_every_steps=0",
)


def run(*words: str, limit: float = 1800, check: bool = True) -> "subprocess.CompletedProcess[str]":
    """A command with its output; fails the test, showing the end of it, unless the exit code is 0 (or not checked)."""
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"still running after {limit} s: {words}\n{output[-6000:]}") from None
    output = re.sub(r"\x1b\[[0-9;]*m", "", output)
    assert not check or process.returncode == 0, f"{words} ended with {process.returncode}:\n{output[-8000:]}"
    return subprocess.CompletedProcess(words, process.returncode, output)


def sky(*words: str, limit: float = 1800, check: bool = True) -> "subprocess.CompletedProcess[str]":
    """`sky …` as a user of the lab. `pytest -s` shows how long each one took."""
    began = time.monotonic()
    done = run(str(SCRIPTS / "client.sh"), "sky", *words, limit=limit, check=check)
    print(f"{time.monotonic() - began:.0f} s: sky {' '.join(words)[:80]}", flush=True)
    return done


def on(host: str, *words: str, check: bool = True, limit: float = 120) -> str:
    """A root command on one of the lab's hosts: login, n1, n2, …"""
    return run(str(SCRIPTS / "on.sh"), host, *words, limit=limit, check=check).stdout


def cut(node: int) -> None:
    """Take the node's network cable out."""
    run("ip", "-n", "mglab-ctl", "link", "set", f"v{node}", "down")


def mend(node: int) -> None:
    run("ip", "-n", "mglab-ctl", "link", "set", f"v{node}", "up")


def wait_until(condition: Callable[[], object], what: str, limit: float = 180) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit} s: {what}"
        time.sleep(0.5)


def digest(run_dir: Path | str) -> str:
    """The digest of a run's newest snapshot, every byte of which has been verified."""
    store = Store(f"{run_dir}/snapshots")
    return read(store, store.steps()[0]).manifest.digest


def shared(name: str) -> Path:
    """A new folder that every node sees, for the user's runs."""
    folder = HOME / "runs" / f"{name}-{time.time_ns()}"
    folder.mkdir(parents=True)
    for path in (folder.parent, folder):
        os.chown(path, USER_ID, USER_ID)
    return folder


def own(folder: Path) -> None:
    """Makes all of it the user's."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER_ID, USER_ID, follow_symlinks=False)


def checkout(folder: Path) -> None:
    """What a user has cloned, in an empty folder of the user's."""
    for name in ("mingpt", "configs", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt", "constraints-cpu.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    own(folder)


def as_user(folder: Path, *words: str, check: bool = True, limit: float = 120) -> str:
    """A command on the login node, as the user."""
    command = f"cd {shlex.quote(str(folder))} && exec {shlex.join(words)}"
    return on("login", "runuser", "-u", USER, "--", "bash", "-c", command, check=check, limit=limit)


def install_once() -> None:
    """Set-up's environment, which clusters of SkyPilot find on their nodes from now on, but for those called new…

    It takes a minute, and there are a dozen of clusters. slurm/prolog-ctld.sh copies it.
    """
    seed = HOME / "seed"
    if (seed / ".complete").exists():
        return
    shutil.rmtree(seed, ignore_errors=True)
    seed.mkdir()
    checkout(seed)
    set_up = ["env", "EXTRAS=s3", "srun", "--nodes=1", "bash", "recipes/setup.sh", "experiment=shakespeare_10m"]
    as_user(seed, *set_up, limit=900)
    (seed / ".complete").touch()


def disk(node: int) -> Path:
    """What the node alone has. It outlives jobs."""
    return LAB / "nodes" / f"n{node}" / "disk"


@contextmanager
def own_disks(cluster: str) -> Iterator[None]:
    """In a cluster of SkyPilot with this name, `runs` of the working folder is each node's own, empty at first."""
    mark = LAB / "run/own-disks" / cluster
    for node in range(1, 7):
        for old in disk(node).iterdir():
            shutil.rmtree(old)
    mark.touch()
    yield
    mark.unlink()


@contextmanager
def drained(node: int) -> Iterator[None]:
    """New jobs don't get this node."""
    on("login", "scontrol", "update", f"NodeName=n{node}", "State=DRAIN", "Reason=a test")
    try:
        yield
    finally:
        on("login", "scontrol", "update", f"NodeName=n{node}", "State=RESUME")


def undisturbed(folder: Path, experiment: str, overrides: tuple[str, ...]) -> str:
    """The digest of the same run in one process, outside the lab, which nobody disturbs."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "mingpt", "fetch", "shakespeare"], cwd=ROOT, check=True, timeout=300)
    command = [sys.executable, "-m", "mingpt.train", f"experiment={experiment}", f"run.dir={folder}/alone", *overrides]
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=600, capture_output=True)
    return digest(folder / "alone")


CLONE_NEWNET = 0x40000000  # of Linux's <sched.h>


@contextmanager
def s3() -> Iterator[tuple[str, str]]:
    """The addresses of one S3 (moto): in this process's network, and in the lab's, which has no way out."""
    servers, app = [], DomainDispatcherApplication(create_backend_app)

    def serve(host: str, network: str = "") -> None:
        """A thread that has gone into a network of the lab listens there, also when it has ended."""
        if network:
            with open(f"/run/netns/{network}") as there:
                assert ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET) == 0
        with socket.create_server((host, 0)) as listening:
            servers.append(
                make_server(
                    host, listening.getsockname()[1], app, threaded=True, request_handler=MotoRequestHandler,
                    fd=listening.fileno(),
                )
            )  # fmt: skip

    for place in (("127.0.0.1",), ("10.99.0.1", "mglab-ctl")):
        thread = threading.Thread(target=serve, args=place)
        thread.start()
        thread.join()
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    here, inside = (f"http://{server.host}:{server.port}" for server in servers)
    yield here, inside
    for server in servers:
        server.shutdown()
