"""A run whose directory is a bucket, on a real S3 server (moto) on loopback."""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mingpt.observe.jsonl import read_metrics
from node_kit import ask_to_stop
from run_kit import Run
from store_kit import HIDDEN, Stores


@pytest.mark.slow
@pytest.mark.example
def test_a_run_in_a_bucket_is_killed_resized_and_ends_with_the_same_bits(
    serve: Stores, text: Path, cache: Path, undisturbed: Callable[..., Run]
) -> None:
    run = Run(f"{serve('moto').url}/there", text, cache)
    started = run.start(2, restarts=5)
    kills = [6, 13]
    chooser = random.Random(3)

    def kill(step: int) -> None:
        if kills and step >= kills[0]:
            kills.pop(0)
            os.kill(chooser.choice(started.workers()), signal.SIGKILL)
        if step == 20:
            ask_to_stop(started.process.pid, workers=started.workers())

    started.on_step = kill
    started.wait()
    assert kills == []
    assert run.store.steps()[0] in range(20, 24)
    output = started.output + run.finish(3)
    assert run.digest() == undisturbed().digest()
    assert [row["step"] for row in read_metrics(run.dir)] == list(range(1, 25))
    manifest = run.store.read_manifest(24).decode()
    assert '"conditional_puts": true' in manifest
    assert HIDDEN not in output + manifest
