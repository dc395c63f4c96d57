"""`sudo python benchmarks/links.py [--mbit 1000 100]`: exact sums against plain DDP over slow links, printed as JSON.

Two nodes of two processes, each node in a network namespace of its own. A relay carries the packets between their
network devices (TUN), no faster than the link, and counts them: the kernel's own `tc netem` is not everywhere. A card
sends and receives at the same time, each at the full speed. Needs Linux and root; leaves nothing behind.

Compared in each of `--rounds` rounds: exact (this project's trainer), fast (the same, reduce=fast) and ddp (a bare loop
with torch's DistributedDataParallel and fused AdamW over the same model). Tokens a second are the median over steps.
"""

import argparse
import ctypes
import fcntl
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

NODES, EACH, STEPS, WARM = 2, 2, 8, 2
MICRO, BLOCK = 4, 128
MODEL: dict[str, Any] = {
    "n_layer": 6,
    "n_head": 6,
    "n_embd": 384,
    "block_size": BLOCK,
    "dropout": 0.0,
}  # 10.7 million parameters
TUN, SET_TUN, MTU = 0x0001 | 0x1000, 0x400454CA, 65500


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def space(node: int) -> str:
    return f"links{os.getpid()}-{node}"


def address(node: int) -> str:
    return f"10.199.0.{node + 1}"


def open_device(node: int) -> int:
    """Make the node's namespace and its network device; returns the device's other end."""
    run("ip", "netns", "add", space(node))
    found: list[int] = []

    def enter() -> None:  # a thread of its own may change its namespace, and ends with it
        with Path("/run/netns", space(node)).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, SET_TUN, struct.pack("16sH22x", b"link", TUN))
        found.append(device)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    for words in (f"addr add {address(node)}/24 dev link", f"link set dev link mtu {MTU} up", "link set lo up"):
        run("ip", "-n", space(node), *words.split())
    return found[0]


class Relay:
    """Carries packets between the nodes' devices. sent: bytes by node."""

    def __init__(self, bits_a_second: float) -> None:
        self.speed, self.sent = bits_a_second / 8, [0] * NODES
        self.devices = [open_device(node) for node in range(NODES)]
        for node in range(NODES):
            threading.Thread(target=self._carry, args=[node], daemon=True).start()

    def _carry(self, node: int) -> None:
        free = time.monotonic()  # when the last packet has left
        while True:
            packet = os.read(self.devices[node], MTU + 64)
            to = packet[19] - 1  # the last byte of an IPv4 destination
            if packet[0] >> 4 != 4 or not 0 <= to < NODES:
                continue
            free = max(free, time.monotonic()) + len(packet) / self.speed
            self.sent[node] += len(packet)
            time.sleep(max(0.0, free - time.monotonic()))
            os.write(self.devices[to], packet)

    def close(self) -> None:
        for node in range(NODES):
            subprocess.run(["ip", "netns", "del", space(node)], check=False)


def launch(relay: Relay, command: list[str], folder: Path) -> list[float]:
    """Run in all namespaces; the seconds of each step, which the command leaves in `folder`/steps.json or metrics."""
    processes = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", space(node), sys.executable, "-m", "torch.distributed.run"),
                *(f"--nnodes={NODES}", f"--node-rank={node}", f"--nproc-per-node={EACH}"),
                *(f"--master-addr={address(0)}", "--master-port=29500", *command),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "link"},
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"{node}.txt").open("w"),
        )
        for node in range(NODES)
    ]
    if sum(process.wait() for process in processes):
        raise SystemExit("".join((folder / f"{node}.txt").read_text()[-2000:] for node in range(NODES)))
    if (steps := folder / "steps.json").exists():
        return list(json.loads(steps.read_text()))
    rows = map(json.loads, (folder / "metrics" / "attempt-00001.jsonl").read_text().splitlines())
    return [row["step_seconds"] for row in rows if "step_seconds" in row]


def ours(text: Path, folder: Path, reduce: str) -> list[str]:
    return [
        *("-m", "mingpt.train", "model=gpt2", *(f"model.{k}={v}" for k, v in MODEL.items())),
        *(f"data.path={text}", f"data.cache_dir={folder}/cache", f"run.dir={folder}", f"reduce={reduce}"),
        *(f"batch.micro_size={MICRO}", f"batch.global_size={MICRO * NODES * EACH}", f"train.max_steps={STEPS}"),
        *("train.log_every=1", "train.eval_every=0", "data.val_fraction=0", "snapshot.every_seconds=0"),
    ]


def ddp(folder: Path) -> None:
    """A worker of the bare loop."""
    import torch
    import torch.distributed as dist

    from mingpt.model.gpt2 import GPT, GPTConfig

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = torch.nn.parallel.DistributedDataParallel(GPT(GPTConfig(vocab_size=65, **MODEL)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        tokens = torch.randint(65, (MICRO, BLOCK + 1))
        loss, count = model(tokens[:, :-1], tokens[:, 1:])
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        (folder / "steps.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def measure(mbit: float, how: str, text: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [__file__, "--worker", name] if how == "ddp" else ours(text, folder, how)
        relay = Relay(mbit * 1e6)
        try:
            seconds = statistics.median(launch(relay, command, folder)[WARM:])
        finally:
            relay.close()
        tokens = MICRO * BLOCK * NODES * EACH / seconds
        return {"mbit": mbit, "how": how, "tokens/s": round(tokens), "MB sent by a card": round(max(relay.sent) / 1e6)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mbit", nargs="+", type=float, default=[1000, 100])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return ddp(options.worker)
    with tempfile.TemporaryDirectory() as name:
        (text := Path(name, "text.txt")).write_text("".join(map(chr, range(32, 97))) * 900)  # 65 characters
        for mbit in options.mbit:
            found: dict[str, list[float]] = {"exact": [], "fast": [], "ddp": []}
            for _ in range(options.rounds):
                for how, speeds in found.items():
                    row = measure(mbit, how, text)
                    print(json.dumps(row), flush=True)
                    speeds.append(row["tokens/s"])
            pairs = zip(found["exact"], found["ddp"], strict=True)
            print(json.dumps({"mbit": mbit, "exact / ddp": round(statistics.median(a / b for a, b in pairs), 3)}))
    return None


if __name__ == "__main__":
    main()
