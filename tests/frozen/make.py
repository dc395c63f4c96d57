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
import torch

import mingpt
from mingpt.snapshot.reader import verify
from mingpt.snapshot.store import Store
from tests.frozen.test_frozen import LAST, MORE, heat, machine, place
from tests.kits import lockstep
from tests.kits.frozen_kit import FROZEN, pack
from tests.kits.store_kit import BUCKET, Moto

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


def verb(*arguments: str, world: int = 1) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    module = ["-m", "mingpt.train", *arguments[1:]] if world > 1 else ["-m", "mingpt.cli.cli", *arguments]
    program = "import sys; from mingpt.cli.cli import main; sys.argv[0] = 'mingpt'; sys.exit(main())"
    command = [sys.executable, *launcher, *module] if world > 1 else [sys.executable, "-c", program, *arguments]
    print("==", *arguments, flush=True)
    ended = subprocess.run(command, env=ENV).returncode
    assert ended == 0, ended


def train(name: str, *overrides: str, world: int = 1, at: str = "runs") -> None:
    given = [*TINY, f"run.dir={at}/{name}", f"run.name={name}", *overrides]
    last = {text.partition("=")[0]: text for text in given}
    verb("train", *last.values(), world=world)


def killed(name: str, step: int, *overrides: str) -> None:
    """A run that is killed at the line of a step, so that its newest snapshot is a hot one."""
    given = [*TINY, f"run.dir=runs/{name}", f"run.name={name}", *overrides]
    last = {text.partition("=")[0]: text for text in given}
    command = [sys.executable, "-m", "mingpt.train", *last.values()]
    process = lockstep.start(command, env=ENV, start_new_session=True)
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
    server = Moto(Path("/tmp/frozen-moto"))
    ENV.update(server.environment(server.port))
    os.environ.update(server.environment(server.port))
    fsspec.config.set_conf_env(fsspec.config.conf)
    server.start()
    server.make_bucket()
    for steps, world in ((8, 1), (12, 2)):
        train("bucket", *TEXT, f"train.max_steps={steps}", world=world, at=server.url)
    verb("rewind", f"{server.url}/bucket@8")
    fsspec.filesystem("s3").get(f"{BUCKET}/bucket", "bucket", recursive=True)
    server.kill()


def main() -> None:
    archive = FROZEN / f"{mingpt.__version__}.tar.xz"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make()
        record()
        pack(Path(folder), archive)
        os.chdir(FROZEN)
    print(archive)


def make() -> None:
    data()
    for steps, world in ((8, 1), (12, 2)):  # two attempts, and a resize
        train("resized", *TEXT, f"train.max_steps={steps}", world=world)
    train("rewound", *TEXT)
    verb("rewind", "runs/rewound@4")
    train("rewound", *TEXT, "train.max_steps=6")
    Path("hot").mkdir()
    killed(
        "hot",
        13,  # that of step 12 is stored by then
        *TEXT,
        "train.max_steps=24",
        "snapshot.every_steps=8",
        "snapshot.hot_every_steps=4",
        "snapshot.hot_dir=hot",
    )
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
            verb("train", f"--config-dir={place(name)}", "--config-name=config", "snapshot.hot_dir=hot", steps, *own)
            resumed[name] = digests(name)[str(last + MORE)]
        os.chdir(here)
    found = {"stored": stored, "resumed": {machine(): resumed}, "hot": hot, "made on": machine()}
    Path("digests.json").write_text(json.dumps(found, indent=1) + "\n")


def digests(name: str) -> dict[str, str]:
    store = Store(f"{place(name)}/snapshots")
    return {str(step): verify(store, step).digest for step in store.steps()}


if __name__ == "__main__":
    main()
