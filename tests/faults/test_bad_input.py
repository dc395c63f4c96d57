"""Bad input: one clear message that names the key or place and the cure, the right exit code, in bounded time.

In this process what ends before a process group starts (bad_input.yaml); one real start for each way out, with no
process left behind.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from mingpt.cli import cli
from mingpt.world.lifetime import STOP_SIGNALS, Lifetime
from tests.kits.node_kit import Node, free_port, needs_mount
from tests.kits.run_kit import TINY
from tests.kits.store_kit import HIDDEN, Moto
from tests.kits.told import Told

ROWS = yaml.safe_load(Path(__file__).with_name("bad_input.yaml").read_text())


@pytest.fixture
def own_process() -> Iterator[None]:
    """What a command changes in its process is as before after it."""
    before, handlers = dict(os.environ), {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    os.environ.clear()
    os.environ.update(before)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def places(folder: Path, text: Path) -> list[str]:
    (folder / "text.txt").write_bytes(text.read_bytes())
    few = ("train.max_steps=12", "launch.max_attempts_without_progress=1")
    return [*TINY, *few, f"run.dir={folder}/run", f"data.path={folder}/text.txt", f"data.cache_dir={folder}/cache"]


def make(path: Path, content: str | None) -> None:
    if content is None:
        path.unlink()
    elif content == "folder":
        path.mkdir()
    elif content == "pipe":
        os.mkfifo(path)
    elif content.startswith("-> "):
        path.symlink_to(content[3:])
    else:
        path.write_bytes(content.encode("latin-1"))


@pytest.mark.parametrize("name", ROWS)
def test_bad_input_is_told(
    name: str, tmp_path: Path, text: Path, own_process: None, capsys: pytest.CaptureFixture[str], told: Told
) -> None:
    row = ROWS[name] if isinstance(ROWS[name], dict) else {"run": ROWS[name]}
    free = free_port()
    with socket.create_server(("", 0)) as busy:
        port = busy.getsockname()[1]
        words = shlex.split(row["run"].replace("{dir}", str(tmp_path)).replace("{free}", str(free)))
        words = [word.replace("{busy}", str(port)).replace("\\n", "\n") for word in words]
        given = words.index("train" if "train" in words else "launch")
        os.environ.update(dict(variable.split("=", 1) for variable in words[:given]))
        arguments = [*places(tmp_path, text), *words[given + 1 :]]
        for file, content in row.get("files", {}).items():
            make(tmp_path / file, content)
        assert cli.run(words[given], arguments, Lifetime()) == row.get("code", 64)
    output, errors = capsys.readouterr()
    if "launch: exit code" in output:  # the detail in brackets is torch's, and has its seconds in it
        errors += output.splitlines()[-1].partition(" (")[0]
    told(errors, tmp_path, free, port, socket.gethostname())


# --- real starts ---


@dataclass(frozen=True)
class Start:
    """A way out. where: what the last thing that is said names. workers: whether mingpt.launch starts any before."""

    form: str
    where: str
    arguments: tuple[str, ...] = ()
    spoil: Callable[[Path], object] = lambda folder: None
    prefix: str = ""  # of the command
    code: int = 64
    workers: bool = False


# A small file system, which only this command sees and which ends with it.
MOUNTED = """unshare -m bash -c 'mount -t tmpfs -o size=8k tmpfs {dir}/small && exec "$@"' bash"""
# Root reads files of mode 0 because of these capabilities; without them it is told no like anybody else.
ANYBODY = "setpriv --bounding-set=-dac_override,-dac_read_search" if os.geteuid() == 0 else ""
STARTS = {
    "before workers start": Start("launch", r"modle\.n_head", ("modle.n_head=1",)),
    "before they meet": Start(
        "launch", r"data\.path=\S+/text\.txt", (), lambda f: (f / "text.txt").unlink(), workers=True
    ),
    "after they have met": Start(
        "launch", "snapshot of step 8 .* another vocabulary", (), lambda f: (f / "text.txt").write_text("hello" * 99),
        workers=True,
    ),
    "no permission": Start(
        "train", r"data\.path=\S+/text\.txt: permission", (), lambda f: (f / "text.txt").chmod(0), ANYBODY
    ),
    "a bucket's server is not there": Start(
        "launch", "dir=s3://bucket/run", ("run.dir=s3://bucket/run",), code=70, workers=True
    ),
    "a full disk": Start(
        "train", r"data\.cache_dir=\S+/small", ("data.cache_dir={dir}/small",), prefix=MOUNTED
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[needs_mount] * ("disk" in n)) for n in STARTS])
def test_each_way_out_for_real(name: str, tmp_path: Path, text: Path, trained: Path) -> None:
    start = STARTS[name]
    shutil.copytree(trained / "snapshots", tmp_path / "run/snapshots")
    shutil.rmtree(tmp_path / "run/snapshots/step-000000012")
    (tmp_path / "small").mkdir()
    usual = places(tmp_path, text)
    start.spoil(tmp_path)
    words = [*shlex.split(start.prefix), sys.executable, "-m", f"mingpt.{start.form}"]
    words += ["--nproc-per-node=2"] * (start.form == "launch") + [*usual, *start.arguments]
    bucket = Moto(tmp_path / "store").environment(free_port())  # nobody listens there
    # The client's own tries take 7 s.
    node = Node([word.replace("{dir}", str(tmp_path)) for word in words], bucket | {"AWS_MAX_ATTEMPTS": "1"})
    workers = False
    while node.process.poll() is None:
        workers = workers or bool(node.workers())
        time.sleep(0.1)
    assert node.wait() == start.code, node.output
    node.assert_nothing_left()
    assert "Traceback" not in node.output
    assert HIDDEN not in node.output
    last = re.split(r"^(?=error: |launch: exit code )", node.output, flags=re.M)[-1]
    assert re.search(start.where, last), node.output
    assert workers == start.workers
    if start.code == 64:  # all processes find the same, and one of them tells it; then the launcher ends with it
        said = [line for line in node.lines if re.search(start.where, line)]
        assert len([line for line in said if not line.startswith(("config: ", "launch: "))]) == 1, node.output
