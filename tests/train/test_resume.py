"""mingpt.train.resume: a run is one experiment. What a resume may change, what it says of that, and what it refuses."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from config_kit import configured
from mingpt.commands.snapshots import main as snapshots
from mingpt.config import affecting
from mingpt.config.keys import keys
from mingpt.errors import UserError
from mingpt.snapshot.format import Manifest
from mingpt.snapshot.reader import read
from mingpt.train import resume
from run_kit import Run
from snapshot_kit import ALONE

NewRun = Callable[..., Run]
NUMERICS = {"data": "d" * 64, "torch": "2"}
# Settings that never affect the result, each with another value.
FREE = (
    "data.workers=3", "data.cache_dir=/elsewhere", "data.cache_timeout_seconds=5", "data.path=moved.txt",
    "train.log_every=7", "train.eval_every=9", "run.name=other", "run.dir=/other", "world.timeout_seconds=5",
    "snapshot.every_steps=1", "snapshot.keep=1", "launch.shutdown_timeout_seconds=5", "resume.changed=true",
    "health.hang_seconds=9", "health.straggler_ratio=3",
    "health.notify=https://hook", "profile.steps=1:2", "track=[]", "run.price_per_hour=2",
    "optimizer.reference_batch=8", "model.init_from=gpt2", "train.max_steps=2000 schedule.decay_steps=1000",
)  # fmt: skip


def manifest(*arguments: str, step: int = 200, **changed: Any) -> Manifest:
    fields: dict[str, Any] = {
        "format": 2, "run": "run", "step": step, "digest": "0" * 64, "parts": {},
        "tensors": {}, "vocabulary": {}, "config": configured(*arguments).model_dump(),
        "fingerprint": NUMERICS, "history": [{"attempt": 1, "from_step": 0}],
    }  # fmt: skip
    return Manifest(**(fields | changed))


def checked(old: Sequence[str], new: Sequence[str], **more: Any) -> tuple[resume.Changes, list[str]]:
    """What is recorded and what is said."""
    said: list[str] = []
    return resume.check(manifest(*old, **more), configured(*new), NUMERICS, ALONE, said.append), said


def refused(old: Sequence[str], new: Sequence[str], **more: Any) -> str:
    with pytest.raises(UserError) as mistake:
        checked(old, new, **more)
    return str(mistake.value)


@pytest.mark.parametrize("setting", FREE)
def test_what_does_not_affect_the_result_gives_no_alarm(setting: str) -> None:
    changes, said = checked((), setting.split())
    assert changes == {}
    assert [line for line in said if "not read" not in line] == []


def test_each_other_key_affects_the_result() -> None:
    """The schema's marks, as a list that a new key has to be put into here, too."""
    free = {
        "train.max_steps",
        "train.log_every",
        "train.eval_every",
        "train.eval_batches",
        "optimizer.reference_batch",
        "model.init_from",
    }
    free |= {"health.spike_window", "health.max_skips"}  # where there is no window, or no rollback
    free |= {f"train.eval_tasks{more}" for more in ("", "_every", "_limit", "_path")}
    free |= {
        "optimizer.shard",
        "train.recompute",
        "schedule.cooldown_steps",
        "optimizer.momentum",
    }  # but of wsd, of muon, and with compile
    free |= {
        "health.hang_seconds",
        "health.audit_every",
        "health.straggler_ratio",
        "health.notify",
        "profile.steps",
        "track",
    }
    free |= {f"data.{name}" for name in ("workers", "path", "tokenizer", "cache_dir", "cache_timeout_seconds")}
    of_text = {k for k in keys({}) if k.partition(".")[0] not in ("run", "world", "snapshot", "launch", "resume")}
    assert affecting.settings(configured().model_dump())[1] == of_text - free


def test_another_learning_rate_is_another_experiment() -> None:
    message = refused(("schedule=constant",), ("schedule=constant", "optimizer.lr=1"))
    assert message == (
        "run.dir=runs/run has step 200 with other settings, and these affect the result:\n"
        "  optimizer.lr: 0.001 -> 1.0\n"
        "  the learning rate of step 201 becomes 1.00e+00, and would have been 1.00e-03\n"
        "Set them back, or choose:\n"
        "  another run.name (or run.dir) starts a run of its own;\n"
        "  resume.changed=true goes on from step 200 with the new values, and the history records both;\n"
        "  `mingpt fork runs/run@200 NEW key=value …` goes on with other values in a run of its own"
    )


def test_who_says_so_goes_on_and_both_values_are_recorded() -> None:
    changes, said = checked((), ("seed=2", "resume.changed=true"))
    assert changes == {"seed": [1, 2]}
    assert said == ["the config changed (seed: 1 -> 2): after step 200, equality with an undisturbed run ends"]


def test_an_extension_tells_both_learning_rates_and_the_way_out() -> None:
    short, long = (
        ("train.max_steps=100", "schedule.warmup_steps=9"),
        ("train.max_steps=1000", "schedule.warmup_steps=9"),
    )
    message = refused(short, long, step=100)
    assert "\n  schedule.decay_steps: 100 -> 1000\n" in message
    assert (
        "\n  the learning rate of step 101 becomes 9.81e-04, and would have been 1.00e-04; schedule.decay_steps=100 "
        "keeps the old schedule\n"
    ) in message
    assert checked(short, (*long, "schedule.decay_steps=100"), step=100) == ({}, [])


def test_a_schedule_that_differs_only_from_now_on_extends_the_run() -> None:
    wsd = ("schedule=wsd", "schedule.warmup_steps=9", "schedule.cooldown_steps=20")
    short, long = ((*wsd, f"train.max_steps={n}") for n in (100, 1000))
    said = "from step 81 on, schedule.decay_steps: 100 -> 1000: the bits are those of a run planned so before"
    assert checked(short, long, step=80) == ({}, [said])
    message = refused(short, long, step=81)  # one step of the decay is done
    assert "schedule.decay_steps: 100 -> 1000" in message
    assert "  `mingpt snapshots rewind runs/run --step 80`, and the same command goes on from the end of" in message
    assert "rewind" not in refused(short, (*long, "seed=2"), step=81)
    assert "optimizer.lr: 0.001 -> 1.0" in refused(short, (*long, "optimizer.lr=1"), step=80)
    kinds = checked(("schedule=constant",), ("schedule=wsd", "schedule.min_ratio=1"), step=500)
    assert kinds[0] == {}


@pytest.mark.parametrize(
    ("size", "what"),
    [
        (16, "step 201 begins at sample 3200, which skips 1600 to 3199"),
        (4, "step 201 begins at sample 800, which repeats 800 to 1599"),
    ],
)
def test_another_batch_tells_which_samples_are_skipped_or_repeated(size: int, what: str) -> None:
    batch = ("batch.micro_size=1", "batch.global_size=8")
    assert f"\n  {what}\n" in refused(batch, (batch[0], f"batch.global_size={size}"))


def test_other_content_under_the_same_name_is_another_experiment() -> None:
    assert "\n  data.sha256: eee" in refused((), (), fingerprint={**NUMERICS, "data": "e" * 64})


def test_another_machine_goes_on_and_says_so() -> None:
    assert checked((), (), fingerprint={**NUMERICS, "torch": "1"}) == (
        {},
        ["the numerics changed (torch: 1 -> 2): after step 200, equality with an undisturbed run ends"],
    )


def test_a_key_that_an_older_version_lacked_had_its_default() -> None:
    config = configured().model_dump()
    del config["train"]["freeze"], config["resume"]
    assert checked((), (), config=config) == ({}, [])
    # One that follows others had their values.
    config = configured("train.max_steps=99", "batch.global_size=32").model_dump()
    del config["schedule"]["decay_steps"], config["optimizer"]["reference_batch"]
    assert checked((), ("train.max_steps=99", "batch.global_size=32"), config=config) == ({}, [])
    assert "\n  the learning rate of step 201 becomes 2.00e-04, and would have been 1.00e-04\n" in refused(
        (), ("train.max_steps=99", "batch.global_size=32", "optimizer.lr=2e-3"), config=config
    )


def test_what_a_strangers_manifest_says_begins_no_line_of_its_own() -> None:
    config = configured().model_dump() | {"seed": "1\n\033[2Jfinished: step 200"}
    message = refused((), (), config=config)
    assert "\033" not in message
    assert "\n  seed: 1\\n\\x1b[2Jfinished: step 200 -> 1\n" in message


def test_a_manifest_with_sections_that_are_none_is_refused_and_no_crash() -> None:
    config: dict[str, Any] = {"optimizer": 3, "schedule": {"kind": []}, "batch": {"global_size": -1}, "model": []}
    assert "with other settings" in refused((), (), config=config)


@pytest.mark.slow
def test_a_second_experiment_does_not_go_on_with_the_first_ones_run(
    new_run: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run("train.max_steps=4")
    run.finish(1)
    before = run.digest()
    started = run.start(2, "optimizer.lr=1")
    assert started.wait() == 1, started.output  # torchrun's; the workers' is 64
    assert started.output.count("error: run.dir=") == 1  # torchrun's own summary repeats the reason
    assert run.digest() == before
    # Extended under the same schedule, and then with another learning rate by permission.
    assert "equality" not in run.finish(1, "train.max_steps=6")
    output = run.finish(1, "train.max_steps=8", "optimizer.lr=1", "resume.changed=true")
    assert "after step 6, equality with an undisturbed run ends" in output
    history = read(run.store, 8).manifest.history
    assert [entry.get("changes") for entry in history] == [None, None, {"optimizer.lr": [0.01, 1.0]}]
    assert snapshots(["show", run.dir]) == 0
    assert "\nattempt 3 changed optimizer.lr: 0.01 -> 1.0\n" in capsys.readouterr().out
    assert json.loads(run.store.read_manifest(8))["history"] == history
