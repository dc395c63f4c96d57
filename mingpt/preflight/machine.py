"""Facts about this node (hardware, versions, free space), and findings that concern this node alone."""

import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil

import mingpt
from mingpt.config.imports import version_of
from mingpt.config.schema import Config
from mingpt.files.folder import Folder
from mingpt.files.storage import names_a_disk
from mingpt.preflight.finding import Finding
from mingpt.world import network
from mingpt.world.platforms import cores

SMI_SECONDS = 5
MIB = 2**20


def facts(config: Config, own: str) -> dict[str, Any]:
    """Numbers and versions for the report, in milliseconds: torch is not imported.

    own: this node's address towards the other nodes.
    """
    interface = network.interface_of(own)
    gpus, driver = _gpus()
    return {
        "host": socket.gethostname(),
        "address": own,
        "interface": interface,
        "mtu": psutil.net_if_stats()[interface].mtu if interface else None,
        "infiniband": network.infiniband_devices(),
        "gpus": gpus,
        "driver": driver,
        "cpus": cores(),
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "project": f"{mingpt.__version__} {source_sha256()[:8]}",
        "disk_free": _free(config.snapshot.dir),
        "memory_free": _free(config.snapshot.hot_dir),
    }


def findings(config: Config, node: Mapping[str, Any], processes: int) -> list[Finding]:
    """Warnings about CPUs, disk and memory. node: this node's facts. processes: of this node."""
    warnings: list[Finding] = []

    def warn(check: str, text: str, advice: str) -> None:
        warnings.append(Finding("warning", node["host"], check, text, advice))

    threads = processes * (config.train.threads + config.data.workers)
    if threads > node["cpus"]:
        text = (
            f"processes={processes}, train.threads={config.train.threads} and data.workers={config.data.workers} want "
            f"{threads} CPUs, and {node['cpus']} are there"
        )
        warn("cpu", text, "give the job more CPUs, or start fewer processes")
    size = state_bytes(config)
    disk, memory = node["disk_free"], node["memory_free"]  # None: a bucket
    # While a new one is written, those that stay and the one that it replaces are all there.
    kept = (config.snapshot.keep + 1) * size
    if disk is not None and disk < kept:
        text = (
            f"snapshot.dir={config.snapshot.dir} has {disk / MIB:.0f} MiB free, and "
            f"snapshot.keep={config.snapshot.keep} takes about {kept / MIB:.0f} MiB"
        )
        warn("disk", text, "free some space, choose another place, or keep fewer")
    two = 2 * size + MIB
    if config.snapshot.hot_every_steps > 0 and memory is not None and memory < two:
        text = (
            f"snapshot.hot_dir={config.snapshot.hot_dir} has {memory / MIB:.0f} MiB free, and two snapshots take about "
            f"{two / MIB:.0f} MiB"
        )
        advice = "give it more (docker: --shm-size), or set snapshot.hot_every_steps=0; training goes on without them"
        warn("memory", text, advice)
    return warnings


def state_bytes(config: Config) -> int:
    """About the size of one snapshot: fp32 weights, two moments, the weights' mean; 0 for a model of one's own."""
    return (16 if config.optimizer.ema else 12) * config.model.parameters(config.data.vocabulary_size())


def source_sha256() -> str:
    """The hash of this package's code: two checkouts of one version may differ."""
    folder = Path(mingpt.__file__).parent
    hashed = sha256()
    for file in sorted(folder.rglob("*.py")):
        hashed.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    return hashed.hexdigest()


def _gpus() -> tuple[list[str], str | None]:
    """The GPUs' names and the driver's version, from nvidia-smi; no GPU and None where that fails."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return [], None
    names = list[str]()
    driver: str | None = None
    # A driver that does not work says so on standard output, too, with a code of its own.
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        name, comma, version = line.rpartition(", ")
        if comma:
            names.append(name)
            driver = driver or version
    return names, driver


def _free(place: str) -> int | None:
    """Free bytes where a local folder is or will be; None for a bucket."""
    if not names_a_disk(place):
        return None
    path = Path(Folder(place).root)
    with suppress(OSError):
        while not path.exists():  # the folder is made by the first attempt
            path = path.parent
        return int(psutil.disk_usage(str(path)).free)
    return None


def by_environment(own: str) -> list[list[str]]:
    """The addresses that NCCL and gloo would take because of variables, each with its variable and value."""
    out: list[list[str]] = []
    for variable in (network.GLOO, network.NCCL):
        value = os.environ.get(variable)
        if not value:
            continue
        names = network.chosen(variable, value)
        taken = list[str]()
        for address in psutil.net_if_addrs()[names[0]] if names else ():
            same_kind = (":" in address.address) == (":" in own)  # IPv6
            hardware = address.address.count(":") == 5
            if same_kind and not hardware:
                taken.append(address.address)
        if own not in taken:
            out.append([taken[0] if taken else "no address", f"{variable}={value}"])
    return out
