"""The claim holds for every kind of data: killed and resized, the same weights. Digests of real runs, compared."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import bpe_kit
from mingpt.prepare.documents import Options
from mingpt.prepare.prepare import prepare
from run_kit import Run
from web_kit import served

pytestmark = pytest.mark.slow

NewRun = Callable[..., Run]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bpe_kit.write_gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def data_set(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Makes a data set of the lines of the text, in shards of so many tokens."""
    folder = tmp_path_factory.mktemp("sets")
    source = folder / "lines.jsonl"
    source.write_text("".join(json.dumps({"text": line}) + "\n" for line in text.read_text().splitlines()))

    def make(shard_tokens: int) -> Path:
        out = folder / str(shard_tokens)
        prepare([str(source)], str(out), bpe_kit.small(), Options(val_fraction=0.1), shard_tokens=shard_tokens)
        return out

    return make


def killed_once(run: Run, world: int) -> str:
    """Run to the end although a worker is killed; returns the output."""
    started, kills = run.start(world, restarts=3), [10]

    def kill(step: int) -> None:
        if kills and step >= kills[0]:
            kills.pop()
            os.kill(started.workers()[-1], signal.SIGKILL)

    started.on_step = kill
    assert started.wait() == 0, started.output
    assert not kills
    assert started.output.count("resumed from step") == 1
    return started.output


def killed_and_resized(run: Run) -> Run:
    """Three processes, all killed at step 6 of 16; two finish it."""
    started = run.start(3)
    started.on_step = lambda step: os.killpg(started.process.pid, signal.SIGKILL) if step == 6 else None
    assert started.wait() < 0, started.output
    assert "resumed from step" in run.finish(2)
    return run


def test_shards_wherever_they_lie_and_however_they_are_cut(
    new_run: NewRun, undisturbed: Callable[..., Run], data_set: Callable[[int], Path], tmp_path: Path
) -> None:
    alone = undisturbed("data=shards", f"data.path={data_set(1 << 20)}")
    moved = new_run("data=shards", f"data.path={data_set(301)}", "data.workers=1")
    killed_once(moved, 3)
    assert moved.digest() == alone.digest() != undisturbed().digest()
    with served(data_set(301)) as url:  # with room for some of the shards only, shared by three processes
        remote = new_run(
            "data=shards",
            f"data.path={url}",
            f"data.cache_dir={tmp_path}/cache",
            "data.cache_bytes=4000",
            name="remote",
        )
        killed_once(remote, 3)
    assert remote.digest() == alone.digest()
    used = [p.stat().st_size for p in (tmp_path / "cache" / "shards").iterdir() if p.suffix in (".bin", ".part")]
    assert sum(used) <= 4000


def test_bpe_text(new_run: NewRun, undisturbed: Callable[..., Run], tokenizer: Path) -> None:
    options = ("data.tokens=bpe", f"data.tokenizer={tokenizer}")
    run = new_run(*options)
    killed_once(run, 3)
    assert run.digest() == undisturbed(*options).digest() != undisturbed().digest()


def test_documents_apart(new_run: NewRun, undisturbed: Callable[..., Run], data_set: Callable[[int], Path]) -> None:
    joined = ("data=shards", f"data.path={data_set(1 << 20)}", "train.max_steps=16")
    options = (*joined, "data.documents=apart")
    alone = undisturbed(*options)
    assert killed_and_resized(new_run(*options)).digest() == alone.digest() != undisturbed(*joined).digest()


def test_conversations(new_run: NewRun, undisturbed: Callable[..., Run], text: Path, tmp_path: Path) -> None:
    lines = [line for line in text.read_text().splitlines() if line][:60]
    options = ("data=chat", "data.tokens=byte", "model.block_size=64", "train.max_steps=16")

    def with_first(role: str, label: str) -> tuple[str, ...]:
        """The same bytes whatever the role of the first answer is, which decides whether it counts."""
        path = tmp_path / f"{role}.jsonl"
        with path.open("w") as f:
            for line in lines:
                first, last = line[:6].strip() or "-", line[6:12].strip() or "-"
                turns = (("user", "one?"), (role, label + first), ("user", "two?"), ("assistant", last))
                f.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) + "\n")
        return *options, f"data.path={path}"

    both, last_alone = with_first("assistant", ""), with_first("system", "Assistant: ")
    alone = undisturbed(*both)
    assert killed_and_resized(new_run(*both)).digest() == alone.digest() != undisturbed(*last_alone).digest()
