"""Makes the runs of this version, VERSION.tar.xz: `python -m tests.frozen.make` in the repository's root.

Four runs: resized, rewound, hot, and one in a bucket; and digests.json, with the digest of each four steps later on
this machine. One more archive is made after each release, and none is made anew: they are the contract with users'
runs. (Before the first release this version's is, where NUMERICS or the format changes.) Paths in the runs' configs are
relative to the archive's folder.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import fsspec
import pytest
import torch

import mingpt
from mingpt.errors import FINISHED
from mingpt.snapshot.reader import verify
from mingpt.snapshot.store import Store
from tests.frozen.test_frozen import LAST, MORE, heat, machine, place, resume
from tests.kits import lockstep
from tests.kits.frozen_kit import FROZEN, pack
from tests.kits.store_kit import BUCKET, Stores
from tests.kits.verb_kit import mingpt as verb

TINY = (
    "model.kind=gpt", "model.n_layer=1", "model.n_head=2", "model.n_embd=8", "model.block_size=8", "model.dropout=0.1",
    "batch.global_size=8", "batch.micro_size=2", "train.max_steps=12", "train.log_every=1", "train.eval_every=4",
    "schedule.warmup_steps=2", "schedule.decay_steps=24", "optimizer.lr=0.01", "snapshot.every_steps=4",
    "snapshot.every_seconds=0", "snapshot.keep=10", "snapshot.asynchronous=false", "snapshot.hot_every_steps=0",
    "snapshot.keep_best=false", "data.cache_dir=cache", "track=[]", "data.kind=text", "data.path=data/text.txt",
)  # fmt: skip


def command(name: str, *overrides: str, world: int = 1, at: str = "runs") -> list[str]:
    """A later setting of one key has the word."""
    given = [*TINY, f"run.dir={at}/{name}", f"run.name={name}", *overrides]
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "-m"] if world > 1 else []
    last = {text.partition("=")[0]: text for text in given}
    return [sys.executable, "-m", *launcher, "mingpt.train", *last.values()]


def train(*settings: str, world: int = 1, at: str = "runs") -> None:
    subprocess.run(command(*settings, world=world, at=at), check=True)


def killed(step: int, *settings: str) -> None:
    """A run that is killed at the line of a step, so that its newest snapshot is a hot one."""
    process = lockstep.start(command(*settings), env=os.environ, start_new_session=True)
    assert process.stdout
    for line in process.stdout:
        if re.match(rf"step +{step}\b", line):
            # It waits soon, since nobody reads what it prints; what it writes in the background is then complete.
            deadline = time.monotonic() + 60
            while not [*Path("hot").glob(f"*/*/step-{step - 1:09d}/manifest.json")] and time.monotonic() < deadline:
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def bucket() -> None:
    """A run that was trained into S3, as its objects lie there."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        stores = Stores(Path(folder), patch)
        url = stores("moto").url
        for steps, world in ((8, 1), (12, 2)):
            train("bucket", f"train.max_steps={steps}", world=world, at=url)
        verb(f"rewind {url}/bucket@8")
        fsspec.filesystem("s3").get(f"{BUCKET}/bucket", "bucket", recursive=True)
        stores.close()


def main() -> None:
    archive = FROZEN / f"{mingpt.__version__}.tar.xz"
    os.environ.update(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make()
        record()
        pack(Path(folder), archive)
        os.chdir(FROZEN)
    print(archive)


def make() -> None:
    words = ("the", "king", "is", "dead", "long", "live", "queen", "and", "all")
    lines = [" ".join(Random(n).choices(words, k=6)) for n in range(60)]
    Path("data").mkdir()
    Path("data/text.txt").write_text("\n".join(lines))
    for steps, world in ((8, 1), (12, 2)):  # two attempts, and a resize
        train("resized", f"train.max_steps={steps}", world=world)
    train("rewound")
    verb("rewind runs/rewound@4")
    train("rewound", "train.max_steps=6")
    Path("hot").mkdir()
    every = ("snapshot.every_steps=8", "snapshot.hot_every_steps=4", "snapshot.hot_dir=hot")
    killed(13, "hot", "train.max_steps=24", *every)  # that of step 12 is stored by then
    bucket()


def record() -> None:
    """Write digests.json. The runs go on in a copy of the folder."""
    torch.set_num_threads(1)  # as in the tests: machine() depends on it
    stored = {name: digests(name) for name in LAST}
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("data", "runs", "bucket"):
            shutil.copytree(name, f"{folder}/{name}")
        shutil.copytree("hot", f"{folder}/memory")  # where heat finds it
        os.chdir(folder)
        hot = verify(Store(str(heat())), LAST["hot"]).digest
        resumed = dict[str, str]()
        for name, last in LAST.items():
            steps = f"train.max_steps={last + MORE}"
            own = () if name != "bucket" else ("run.dir=bucket", "snapshot.dir=bucket/snapshots")
            assert resume(place(name), steps, *own) == FINISHED
            resumed[name] = digests(name)[str(last + MORE)]
        os.chdir(here)
    found = {"stored": stored, "resumed": {machine(): resumed}, "hot": hot, "made on": machine()}
    Path("digests.json").write_text(json.dumps(found, indent=1) + "\n")


def digests(name: str) -> dict[str, str]:
    store = Store(f"{place(name)}/snapshots")
    return {str(step): verify(store, step).digest for step in store.steps()}


if __name__ == "__main__":
    main()
