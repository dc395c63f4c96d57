"""A child process for what needs torch or may hang: access to the run directory, and an all-reduce over gloo.

Preflight starts it first, so that it imports torch while the nodes meet. It takes requests and answers them, one JSON
line each. Preflight waits for each answer with a limit, and kills a helper that hangs.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, Queue
from typing import Any

from mingpt.errors import TransientError, UserError
from mingpt.redact import without_secrets
from mingpt.storage import LIMIT

MEASURE_SECONDS = 1.5  # of all-reduces
# Limit of a call of the store, unless the environment sets one. The first call makes the client, too: with load 20 on
# two cores, a healthy store's answer once took more than 8 s.
STORE_SECONDS = "20"
PROBE = "preflight-"  # the names of files that nodes write begin with it


class Helper:
    """Preflight's side: starts the child process, sends requests, receives answers."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mingpt.preflight.helper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={LIMIT: STORE_SECONDS, **os.environ},
        )
        self.answers: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.errors: list[str] = []
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def _read_errors(self) -> None:
        assert self.process.stderr
        self.errors.extend(self.process.stderr)

    def send(self, **request: Any) -> None:
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:  # the helper has died: `receive` returns the error
            pass

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next answer, or {"error": …} if none comes within `seconds` or the helper has died."""
        try:
            line = self.answers.get(timeout=max(0.01, seconds))
        except Empty:
            return {"error": f"no answer within {seconds:.0f} s"}
        if not line:
            self.answers.put("")
            self.process.wait(5)
            return {"error": self.errors[-1].strip() if self.errors else f"exit code {self.process.returncode}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def bytes_a_step(parameters: int, microbatches: int, processes: list[int]) -> int:
    """How many bytes the busiest node sends to other nodes for one exact sum. processes: of each node."""
    from mingpt.compute.exchange import held

    of_each = processes if len(set(processes)) > 1 else [1] * len(processes)  # otherwise nodes add up inside first
    world, first, most = sum(of_each), 0, 0.0
    pieces = [len(nodes) for nodes in held(world, microbatches)]
    for count in of_each:
        most = max(most, sum(pieces[first : first + count]) * (world - count) / world)  # slices for other nodes
        first += count
    most += (world - 1) / world  # all-gather: each slice once, around a ring
    return int(most * 4 * parameters)


# --- the child process ---


def _about() -> dict[str, Any]:
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"devices": devices, "capability": torch.backends.cpu.get_cpu_capability(), "nccl_in_torch": _nccl()}


def _nccl() -> str | None:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None


def _write(places: list[list[str]], name: str, snapshot_dir: str) -> dict[str, Any]:
    """Write a small file into each place and read it back; test whether the snapshots' store has conditional puts."""
    from mingpt import storage
    from mingpt.snapshot.store import Store

    begun = time.monotonic()
    problems: list[str] = []
    for key, url in places:
        try:
            fs, path = storage.open_fs(url, key)
            file, content = f"{path.rstrip('/')}/{PROBE}{name}", f"{name}\n".encode()
            with storage.place(key, url):
                storage.make_folder(fs, path)
                fs.pipe_file(file, content)
                if fs.cat_file(file) != content:
                    shown = without_secrets(url)
                    raise UserError(f"{key}={shown}: a file reads back with another content: choose another place")
        except (UserError, TransientError) as error:
            problems += error.problems if isinstance(error, UserError) else [str(error)]
    conditional = None
    if not problems:
        try:
            conditional = Store(snapshot_dir).conditional_puts
        except (UserError, TransientError) as error:
            problems += error.problems if isinstance(error, UserError) else [str(error)]
    return {"problems": problems, "conditional": conditional, "seconds": time.monotonic() - begun}


def _list(key: str, url: str) -> dict[str, Any]:
    """Which nodes' files are in a place."""
    from mingpt import storage

    try:
        fs, path = storage.open_fs(url, key)
        with storage.place(key, url):
            names = [entry.rpartition("/")[2] for entry in fs.ls(path, detail=False)]
    except (UserError, TransientError) as error:
        return {"problems": error.problems if isinstance(error, UserError) else [str(error)], "seen": []}
    return {"problems": [], "seen": [name.removeprefix(PROBE) for name in names if name.startswith(PROBE)]}


def _clean(places: list[list[str]], name: str) -> dict[str, Any]:
    from mingpt import storage

    for key, url in places:
        try:
            fs, path = storage.open_fs(url, key)
            fs.rm_file(f"{path.rstrip('/')}/{PROBE}{name}")
        except Exception:  # _write has reported it, or the file was never written
            continue
    return {}


def _host() -> dict[str, Any]:
    import torch.distributed as dist

    _stores.append(dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
    return {"port": _stores[0].port}


def _reduce(
    host: str, port: int, rank: int, size: int, count: int, seconds: float, environment: dict[str, str]
) -> dict[str, Any]:
    """All-reduce `count` bytes for MEASURE_SECONDS, one process a node: the bytes a second that each node sends."""
    import torch
    import torch.distributed as dist

    os.environ.update(environment)
    limit = timedelta(seconds=seconds)
    if rank:
        _stores.append(dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False))
    try:
        dist.init_process_group("gloo", store=_stores[0], rank=rank, world_size=size, timeout=limit)
        buffer = torch.zeros(count // 4)
        rounds, best, deadline = torch.ones(1), float("inf"), time.monotonic() + MEASURE_SECONDS
        while rounds.item() > 0:
            begun = time.monotonic()
            dist.all_reduce(buffer)
            best = min(best, time.monotonic() - begun)
            rounds.fill_(float(time.monotonic() < deadline))
            dist.all_reduce(rounds, dist.ReduceOp.MIN)  # so that all stop after the same round
        return {"bandwidth": 2 * (size - 1) / size * count / best}
    except Exception as error:  # gloo's errors have no class of their own
        return {"error": re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0])}  # without the line of gloo's source


_stores: list[Any] = []  # the TCPStore, kept alive until this process ends
WORK: dict[str, Callable[..., Any]] = {
    "write": _write,
    "list": _list,
    "clean": _clean,
    "host": _host,
    "reduce": _reduce,
    "bytes": bytes_a_step,
}


def main() -> None:
    print(json.dumps(_about()), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = WORK[request.pop("do")](**request)
        print(json.dumps(answer if isinstance(answer, dict) else {"value": answer}), flush=True)
    os._exit(0)  # without waiting for gloo's threads, which may wait for nodes that have ended


if __name__ == "__main__":
    main()
