"""`python benchmarks/snapshots.py [--model gpt-30m|gpt2] [--store local|s3] [--rounds 3]`: the cost of a snapshot.

Compares ours with torch.save and torch's DCP. One process saves the state of a model with AdamW to a local folder, or
to an S3 server (moto) on this machine, and reads it back. Each runs once a round, in a process of its own; the figures
are medians over the rounds, in seconds:
  stall            how long the call keeps training waiting
  durable          until all is on the disk or in the bucket
  restore          until all tensors are back in memory
  memory           peak of the process beyond the state itself, as a multiple of the state's size
  stall / copy     stall / a bare copy of the state into memory that is already mapped
  raw / restore    reading the same files without decoding / restore
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.snapshot.reader import read
from mingpt.snapshot.retention import Retention
from mingpt.snapshot.store import Store
from mingpt.snapshot.writer import SnapshotWriter
from mingpt.world.world import World

MODELS = {
    "gpt-30m": GPTConfig(vocab_size=50304, n_layer=6, n_head=6, n_embd=384, block_size=256, dropout=0.0),
    "gpt2": GPTConfig(vocab_size=50304, n_layer=12, n_head=12, n_embd=768, block_size=1024, dropout=0.0),
}
CONTESTANTS = ("ours", "torch.save", "dcp.save", "dcp.async_save")
State = dict[str, dict[str, Tensor]]


def state_of(model: str) -> State:
    weights = {name: tensor.detach() for name, tensor in GPT(MODELS[model]).state_dict().items()}
    moments = {f"{n}.{slot}": torch.rand_like(t) for n, t in weights.items() for slot in ("exp_avg", "exp_avg_sq")}
    return {"model": weights, "optimizer": moments}


def size_of(state: State) -> int:
    return sum(t.nbytes for tensors in state.values() for t in tensors.values())


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def empty(state: State) -> State:
    return {kind: {n: torch.empty_like(t) for n, t in tensors.items()} for kind, tensors in state.items()}


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = act()
    return time.perf_counter() - began, result


def ours(place: str, state: State) -> tuple[Callable[[int], Callable[[], Any]], Callable[[int], Any]]:
    alone = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), backend="gloo")
    about: dict[str, Any] = {"run": "b", "vocabulary": {}, "config": {}, "fingerprint": {}, "history": []}
    writer = SnapshotWriter(Store(place), alone, Retention(9, keep_best=False), about, print)

    def save(step: int) -> Callable[[], Any]:
        writer.start(step, state)  # type: ignore[arg-type]
        return writer.wait

    return save, lambda step: read(Store(place), step)


def others(name: str, place: str, state: State) -> tuple[Callable[[int], Callable[[], Any]], Callable[[int], Any]]:
    def dcp_place(step: int) -> dict[str, Any]:
        folder = f"{place}/{step}"
        return {"storage_writer": FsspecWriter(folder)} if "://" in place else {"checkpoint_id": folder}

    def save(step: int) -> Callable[[], Any]:
        if name == "torch.save":
            with fsspec.open(f"{place}/{step}.pt", "wb") as f:
                torch.save(state, f)
        elif name == "dcp.save":
            dcp.save(state, **dcp_place(step))
        else:
            return dcp.async_save(state, **dcp_place(step)).result  # type: ignore[union-attr]
        return lambda: None

    def restore(step: int) -> Any:
        if name == "torch.save":
            with fsspec.open(f"{place}/{step}.pt", "rb") as f:
                return torch.load(f, weights_only=True)
        back = empty(state)
        folder = f"{place}/{step}"
        dcp.load(back, **({"storage_reader": FsspecReader(folder)} if "://" in place else {"checkpoint_id": folder}))
        return back

    return save, restore


def measure(name: str, model: str, place: str) -> dict[str, float]:
    """Measure one of CONTESTANTS, in this process. The second save counts: the first one warms buffers and imports."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = state_of(model)
    before = peak_bytes()
    save, restore = ours(place, state) if name == "ours" else others(name, place, state)
    save(1)()
    began = time.perf_counter()
    stall, finish = timed(lambda: save(2))
    finish()
    durable = time.perf_counter() - began
    memory = (peak_bytes() - before) / size_of(state)
    into = empty(state)
    for kind in into:
        for n, tensor in into[kind].items():
            tensor.copy_(state[kind][n])  # now its pages are mapped

    def copy() -> None:
        for kind in into:
            for n, tensor in into[kind].items():
                tensor.copy_(state[kind][n])

    copy_seconds, _ = timed(copy)
    fs, root = fsspec.core.url_to_fs(place)
    files = [f for f in fs.find(root) if "2/" in f.removeprefix(root) or f.endswith("/2.pt")]
    raw, _ = timed(lambda: fs.cat(files))
    restored, _ = timed(lambda: restore(2))
    return {
        "stall": stall, "durable": durable, "restore": restored, "memory": memory,
        "stall / copy": stall / copy_seconds, "raw / restore": raw / restored, "state MB": size_of(state) / 1e6,
    }  # fmt: skip


@contextmanager
def new_place(store: str) -> Iterator[str]:
    """The URL of an empty folder, or in an empty bucket on a new server, which ends with the context."""
    with tempfile.TemporaryDirectory() as folder:
        if store == "local":
            yield folder
            return
        with socket.create_server(("127.0.0.1", 0)) as s:
            port = s.getsockname()[1]
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.environ |= {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ["FSSPEC_S3_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        fsspec.config.set_conf_env(fsspec.config.conf)
        try:
            for _ in range(300):
                with socket.socket() as s:
                    if s.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            fsspec.filesystem("s3").mkdir("bench")
            yield "s3://bench/snapshots"
        finally:
            server.kill()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt-30m")
    parser.add_argument("--store", choices=("local", "s3"), default="local")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=CONTESTANTS, help="measure one, once, in this process")
    options = parser.parse_args()
    if options.only:
        with new_place(options.store) as place:
            print(json.dumps(measure(options.only, options.model, place)))
        return
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    for _ in range(options.rounds):
        for name in CONTESTANTS:
            command = [sys.executable, __file__, "--model", options.model, "--store", options.store, "--only", name]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rounds[name].append(json.loads(done.stdout.splitlines()[-1]))
    medians = {
        name: {key: round(statistics.median(r[key] for r in results), 3) for key in results[0]}
        for name, results in rounds.items()
    }
    about = {"model": options.model, "store": options.store, "rounds": options.rounds}
    print(json.dumps(about | {"medians": medians}, indent=1))


if __name__ == "__main__":
    main()
