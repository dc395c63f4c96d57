"""A process beside preflight for all that needs torch or may hang: the run directory, and an all-reduce over gloo.

Started at once, it imports torch while the nodes meet, and then takes requests, a JSON line each. Preflight waits for
an answer as long as it likes; a helper that is stuck is killed.
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

REDUCE_SECONDS = 1.5  # of measuring
STORE_SECONDS = "8"  # for a call of the store; the environment may say otherwise
PROBE = "preflight-"


class Helper:
    """Preflight's end."""

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
        except OSError:  # it has died: told by the missing answer
            pass

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next answer; {"error": …} if none comes."""
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
    """What the busiest node sends to the others for one exact sum. processes: of each node."""
    from mingpt.compute.reduction import whole_nodes
    from mingpt.world.world import share

    world = sum(processes)
    pieces = [
        len(whole_nodes(s.start, s.stop, 0, microbatches))
        for s in (share(r, world, microbatches) for r in range(world))
    ]
    slice_bytes, first, most = 4 * parameters / world, 0, 0.0
    for count in processes:
        exchange = sum(pieces[first : first + count]) * (world - count)  # to every process of another node
        most = max(most, (exchange + world - 1) * slice_bytes)  # and around the ring, once over each cable
        first += count
    return int(most)


# --- the helper's own end ---


def _about() -> dict[str, Any]:
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"devices": devices, "capability": torch.backends.cpu.get_cpu_capability(), "nccl_in_torch": _nccl()}


def _nccl() -> str | None:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None


def _write(places: list[list[str]], name: str, snapshot_dir: str) -> dict[str, Any]:
    """Write and read back a small file in each place; ask the store of snapshots whether it heeds a put's condition."""
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
                    raise UserError(f"{key}={shown}: what was written is read back otherwise: choose another place")
        except (UserError, TransientError) as error:
            problems += error.problems if isinstance(error, UserError) else [str(error)]
    conditional = None
    if not problems:
        try:
            conditional = Store(snapshot_dir).conditional_puts
        except (UserError, TransientError) as error:
            problems += error.problems if isinstance(error, UserError) else [str(error)]
    return {"problems": problems, "conditional": conditional, "seconds": time.monotonic() - begun}


def _look(key: str, url: str) -> dict[str, Any]:
    """Whose files are in a place."""
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
        except Exception:  # told by _write already, or never written
            continue
    return {}


def _host() -> dict[str, Any]:
    import torch.distributed as dist

    _kept.append(dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
    return {"port": _kept[0].port}


def _reduce(
    host: str, port: int, rank: int, size: int, count: int, seconds: float, environment: dict[str, str]
) -> dict[str, Any]:
    """Sum `count` bytes again and again: how many a second each node sends, with one process a node."""
    import torch
    import torch.distributed as dist

    os.environ.update(environment)
    limit = timedelta(seconds=seconds)
    if rank:
        _kept.append(dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False))
    try:
        dist.init_process_group("gloo", store=_kept[0], rank=rank, world_size=size, timeout=limit)
        buffer = torch.zeros(count // 4)
        rounds, best, deadline = torch.ones(1), float("inf"), time.monotonic() + REDUCE_SECONDS
        while rounds.item() > 0:
            begun = time.monotonic()
            dist.all_reduce(buffer)
            best = min(best, time.monotonic() - begun)
            rounds.fill_(float(time.monotonic() < deadline))
            dist.all_reduce(rounds, dist.ReduceOp.MIN)  # all stop after the same one
        return {"bandwidth": 2 * (size - 1) / size * count / best}
    except Exception as error:  # gloo's errors have no class of their own
        return {"error": re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0])}  # without the place in its source


_kept: list[Any] = []  # the store lives as long as this process
WORK: dict[str, Callable[..., Any]] = {
    "write": _write,
    "look": _look,
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
    os._exit(0)  # gloo's threads may wait for nodes that have ended


if __name__ == "__main__":
    main()
