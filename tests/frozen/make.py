"""Made the run directories of this folder, with the code as it is: `cd tests/frozen && PYTHONPATH=../kits python make.py`.

They are the contract with users' old runs, so they are not made again. This program says how they were made, at commit d266895;
later code no longer has all that it imports. A run of a kind that comes later is added beside them. Paths in their configs are
relative to this folder.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import fsspec

from mingpt.selftest import lockstep
from run_kit import Started
from store_kit import BUCKET, Moto

TINY = (
    "model.kind=gpt", "model.n_layer=1", "model.n_head=2", "model.n_embd=8", "model.block_size=8", "model.dropout=0.1",
    "batch.global_size=8", "batch.micro_size=2", "train.max_steps=12", "train.log_every=1", "train.eval_every=4",
    "schedule.warmup_steps=2", "schedule.decay_steps=24", "optimizer.lr=0.01", "snapshot.every_steps=4",
    "snapshot.every_seconds=0", "snapshot.keep=10", "snapshot.asynchronous=false", "snapshot.hot_every_steps=0",
    "snapshot.keep_best=false", "data.cache_dir=cache", "track=[]",
)  # fmt: skip
TEXT = ("data.kind=text", "data.path=data/text.txt")
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def data() -> None:
    words = ("the", "king", "is", "dead", "long", "live", "queen", "and", "all")
    lines = [" ".join(Random(n).choices(words, k=6)) for n in range(60)]
    Path("data").mkdir()
    Path("data/text.txt").write_text("\n".join(lines))


def mingpt(*arguments: str, world: int = 1, code: int = 0) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    module = ["-m", "mingpt.train", *arguments[1:]] if world > 1 else ["-m", "mingpt.cli", *arguments]
    verb = "import sys; from mingpt.cli import main; sys.argv[0] = 'mingpt'; sys.exit(main())"
    command = [sys.executable, *launcher, *module] if world > 1 else [sys.executable, "-c", verb, *arguments]
    print("==", *arguments, flush=True)
    ended = subprocess.run(command, env=ENV).returncode
    assert ended == code, f"{ended} in place of {code}"


def train(
    name: str, *overrides: str, world: int = 1, tiny: tuple[str, ...] = TINY, at: str = "runs", code: int = 0
) -> None:
    given = [*tiny, f"run.dir={at}/{name}", f"run.name={name}", *overrides]
    last = {text.partition("=")[0]: text for text in given}
    mingpt("train", *last.values(), world=world, code=code)


def killed(name: str, step: int, *overrides: str) -> None:
    """A run that is killed at the line of a step, so that its newest snapshot is a hot one."""
    given = [*TINY, f"run.dir=runs/{name}", f"run.name={name}", *overrides]
    last = {text.partition("=")[0]: text for text in given}
    started = Started(
        lockstep.start([sys.executable, "-m", "mingpt.train", *last.values()], env=ENV, start_new_session=True)
    )

    def kill(at: int) -> None:
        if at >= step:
            os.killpg(started.process.pid, signal.SIGKILL)

    started.on_step = kill
    assert started.wait() == -signal.SIGKILL, started.output


def bucket() -> None:
    """A run that was trained into S3, as its objects lie there."""
    server = Moto(Path("/tmp/frozen-moto"))
    ENV.update(server.environment(server.port))
    os.environ.update(server.environment(server.port))
    fsspec.config.set_conf_env(fsspec.config.conf)
    server.start()
    server.make_bucket()
    for steps, world in ((8, 1), (12, 2)):
        train("bucket", *TEXT, f"train.max_steps={steps}", world=world, at=server.url)
    mingpt("rewind", f"{server.url}/bucket@8")
    fsspec.filesystem("s3").get(f"{BUCKET}/bucket", "bucket", recursive=True)
    server.kill()


def main() -> None:
    for folder in ("data", "runs", "bucket", "hot", "cache"):
        shutil.rmtree(folder, ignore_errors=True)
    data()
    for steps, world in ((8, 1), (12, 2)):  # two attempts, and a resize
        train("resized", *TEXT, f"train.max_steps={steps}", world=world)
    train("rewound", *TEXT)
    mingpt("rewind", "runs/rewound@4")
    train("rewound", *TEXT, "train.max_steps=6")
    Path("hot").mkdir()
    killed(
        "hot",
        15,
        *TEXT,
        "train.max_steps=24",
        "snapshot.every_steps=8",
        "snapshot.hot_every_steps=2",
        "snapshot.hot_dir=hot",
    )
    bucket()
    shutil.rmtree("cache", ignore_errors=True)


if __name__ == "__main__":
    main()
