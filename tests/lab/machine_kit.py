"""Machines with nothing but a fresh Debian: each boots its own systemd in namespaces of its own. See machine.sh.

    with machines(folder, {"ctl": 0, "gpu1": 1}) as all:
        all.run("ctl", "hostname -s")

A name has a number of GPUs: device files without a driver. All machines share /home, know each other's names, and have
sshd, a key of root's and a user. There is no way out but for apt, through a proxy that lives as long as they do.
"""

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.kits.net_kit import Net, hosts
from tests.kits.node_kit import wait_until

SCRIPT = Path(__file__).with_name("machine.sh")
# What an installed Debian has.
PACKAGES = "systemd-sysv,dbus,iproute2,openssh-server,sudo,netbase"
USER, USER_ID = "ada", 4343
NETWORK, PROXY = "10.97.0", "10.97.0.254"
CGROUPS = Path("/sys/fs/cgroup")
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
SPACES = ("--mount", "--uts", "--ipc", "--pid", "--cgroup")
LIMIT = 900  # seconds: packages come from a mirror


@dataclass
class Machines:
    net: Net
    folder: Path
    pids: dict[str, int] = field(default_factory=dict)
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def home(self) -> Path:
        """The user's, on all machines."""
        return self.folder / "home" / USER

    def run(self, name: str, command: str, user: str = "root", folder: str = "~", limit: float = LIMIT) -> str:
        """A shell command's output; fails the test unless it ends with 0."""
        inside = ["nsenter", f"--target={self.pids[name]}", *SPACES, "--net", "--wdns=/", "--"]
        login = ["env", "-i", "PATH=/usr/sbin:/usr/bin", "runuser", "-l", user, "-c", f"cd {folder} && {command}"]
        done = subprocess.run(
            [*inside, *login], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=limit,
        )  # fmt: skip
        assert done.returncode == 0, f"{name}: {command} ended with {done.returncode}:\n{done.stdout[-6000:]}"
        return done.stdout

    def boot(self, name: str, gpus: int) -> None:
        groups = list(_groups(name))
        for group in groups:
            group.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):  # of cgroups v1: a new one has none
                if (group / file).exists():
                    (group / file).write_text((group.parent / file).read_text())
        join = "; ".join(f"echo $$ >{group}/cgroup.procs" for group in groups)
        folders = str(self.folder / "base"), str(self.folder / name), str(self.net.hosts_file(name))
        boot = ["unshare", *SPACES, "--fork", "--kill-child", "bash", str(SCRIPT), name, *folders, *_shown()]
        # The cgroups are this machine's before the namespaces are made, where they become the root.
        outside = ["bash", "-c", f"{join}; exec nsenter {shlex.join(self.net.enter(name)[1:])} {shlex.join(boot)}"]
        log = (self.folder / f"{name}.log").open("w")
        process = subprocess.Popen(outside, env={**os.environ, "GPUS": str(gpus)}, stdout=log, stderr=log)
        log.close()
        self.started.append(process)

        def up() -> bool:
            assert process.poll() is None, Path(log.name).read_text()
            self.pids[name] = _systemd(process.pid)
            with suppress(AssertionError):
                return self.pids[name] > 0 and self.run(name, "systemctl is-active ssh").strip() == "active"
            return False

        wait_until(up, f"{name} is up", 120)


def _groups(name: str) -> Iterator[Path]:
    """The machine's own cgroup in each of this kernel's hierarchies."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, there, kind, _ = line.split(maxsplit=3)
        if kind in ("cgroup", "cgroup2") and Path(there).is_relative_to(CGROUPS):
            yield Path(there) / f"mingpt-{os.getpid()}-{name}"


def _tree(name: str) -> list[Path]:
    """Its cgroups, those inside others first."""
    return sorted(path for group in _groups(name) for path in (group, *group.rglob("*")) if path.is_dir())[::-1]


def _remove_groups(name: str) -> None:
    for group in _tree(name):
        group.rmdir()


def _systemd(pid: int) -> int:
    """`nsenter` forks `unshare`, which forks process 1 of the machine; 0 until that has become systemd."""
    with suppress(OSError):
        while Path(f"/proc/{pid}/comm").read_text() != "systemd\n":
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if not children:
                return 0
            pid = int(children[0])
        return pid
    return 0


def _shown() -> list[str]:
    """What the Python that runs the tests consists of: an administrator would have put it on all machines."""
    paths = {Path(p) for p in (sys.prefix, sys.base_prefix, *(p for p in sys.path if p.endswith("site-packages")))}
    return [str(p) for p in sorted(paths) if not any(p.is_relative_to(q) for q in paths - {p})]


def _debian(folder: Path, names: list[str]) -> None:
    """A root with the user, ssh's keys, and the package sources of this computer."""
    os_release = dict(re.findall(r"(?m)^(\w+)=\"?(.*?)\"?$", Path("/etc/os-release").read_text()))
    suite = os_release["VERSION_CODENAME"]
    targets = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"]
    listed = subprocess.run(targets, capture_output=True, text=True, check=True).stdout.splitlines()
    sources = [line for line in dict.fromkeys(listed) if re.fullmatch(f"{suite}(-updates|-security)?", line.split()[1])]
    if not sources or not all(line.startswith("http://") for line in sources):
        pytest.skip(f"needs apt sources for {suite} by http, which the machines' proxy can read")
    mirror = next(line.split()[0] for line in sources if line.split()[1] == suite)
    include = PACKAGES + (",python3" if Path(sys.base_prefix) == Path("/usr") else "")
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={include}", suite, str(folder), mirror],
        check=True, stdout=subprocess.DEVNULL, timeout=LIMIT,
    )  # fmt: skip
    (folder / "etc/apt/sources.list").write_text("".join(f"deb {line}\n" for line in sources))
    (folder / "etc/apt/apt.conf.d/90proxy").write_text(f'Acquire::http::Proxy "http://{PROXY}:3142";\n')
    (folder / "etc/machine-id").write_text("")
    (folder / "etc/systemd/system/console-getty.service").symlink_to("/dev/null")  # there is no console
    subprocess.run(["chroot", str(folder), "useradd", "-M", "-u", str(USER_ID), "-s", "/bin/bash", USER], check=True)
    root = folder / "root"
    root.chmod(0o711)  # a Python may lie below
    (root / ".ssh").mkdir(mode=0o700, exist_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / ".ssh/id_ed25519")], check=True)
    shutil.copy(root / ".ssh/id_ed25519.pub", root / ".ssh/authorized_keys")
    key = " ".join((folder / "etc/ssh/ssh_host_ed25519_key.pub").read_text().split()[:2])
    (root / ".ssh/known_hosts").write_text(f"{','.join(names)} {key}\n")


@contextmanager
def _proxy(pid: int, cache: Path) -> Iterator[None]:
    """For apt: listens in the network of process `pid`, and asks the mirror in this one. Each file is fetched once."""
    cache.mkdir()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            kept = cache / sha256(self.path.encode()).hexdigest()
            try:
                with lock:
                    if not kept.exists():
                        with urlopen(self.path, timeout=60) as answer:
                            kept.write_bytes(answer.read())
                status, body = 200, kept.read_bytes()
            except HTTPError as error:
                status, body = error.code, b""
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    made: list[ThreadingHTTPServer] = []

    def listen() -> None:  # a thread of its own stays in the other network, and so does the socket that it makes
        network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        assert ctypes.CDLL(None).setns(network, NEW_NETWORK) == 0
        os.close(network)
        made.append(ThreadingHTTPServer((PROXY, 3142), Handler))

    for target in (listen, lambda: made[0].serve_forever()):
        thread = threading.Thread(target=target)
        thread.start()
        if target is listen:
            thread.join()
    try:
        yield
    finally:
        made[0].shutdown()
        made[0].server_close()
        thread.join()


@contextmanager
def machines(folder: Path, gpus: Mapping[str, int]) -> Iterator[Machines]:
    """Nothing of them is left afterwards, nor of `folder`."""
    addresses = {name: f"{NETWORK}.{10 + i}" for i, name in enumerate(gpus)}
    started: list[subprocess.Popen[bytes]] = []
    try:
        with hosts(addresses) as net:
            assert net.bridge
            bridge = ["nsenter", f"--target={net.bridge.pid}", "--net"]
            subprocess.run([*bridge, *f"ip addr add {PROXY}/24 dev bridge".split()], check=True)
            _debian(folder / "base", list(gpus))
            made = Machines(net, folder, started=started)
            made.home.mkdir(parents=True)
            os.chown(made.home, USER_ID, USER_ID)
            with _proxy(net.bridge.pid, folder / "packages"):
                for name, number in gpus.items():
                    made.boot(name, number)
                yield made
    finally:
        for process in started:  # they are in the machines' cgroups
            process.wait(60)
        for name in gpus:
            _remove_groups(name)
        shutil.rmtree(folder)
