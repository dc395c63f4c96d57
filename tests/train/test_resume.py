"""mingpt.train.resume: a run is one experiment. What a resume may change, what it says of that, and what it refuses."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mingpt.cli import cli
from mingpt.compose.stored import replay_config
from mingpt.config import affecting
from mingpt.config.keys import keys
from mingpt.errors import USER_ERROR, UserError
from mingpt.snapshot.format import Manifest
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from mingpt.train import resume
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from tests.kits.config_kit import configured
from tests.kits.replay_kit import RANDOM, settings_of, train_here
from tests.kits.snapshot_kit import ALONE, PROVENANCE
from tests.kits.told import Told

OWN = "schedule._target_=examples.own_schedule.one_minus_sqrt"
NUMERICS = {"data": "d" * 64, "torch": "2"}
# Settings that never affect the result, each with another value.
FREE = (
    "data.workers=3", "data.path=moved.txt", "train.eval_every=9", "run.name=other", "world.timeout_seconds=5",
    "snapshot.every_steps=1", "launch.shutdown_timeout_seconds=5", "health.hang_seconds=9", "profile.steps=1:2",
    "track=[]", "optimizer.reference_batch=8", "model.init_from=gpt2", "train.max_steps=2000 schedule.decay_steps=1000",
)  # fmt: skip


def checked(
    old: Sequence[str], new: Sequence[str], step: int = 200, **changed: Any
) -> tuple[resume.Changes, list[str]]:
    """What is recorded and what is said. changed: of what the snapshot stores beside the state."""
    said = list[str]()
    stored = PROVENANCE | {"config": configured(*old).model_dump(), "fingerprint": NUMERICS} | changed
    manifest = Manifest(format=3, step=step, digest="0" * 64, parts={}, tensors={}, **stored)
    return resume.check(manifest, configured(*new), NUMERICS, ALONE, said.append), said


def refused(old: Sequence[str], new: Sequence[str], **more: Any) -> str:
    with pytest.raises(UserError) as mistake:
        checked(old, new, **more)
    return str(mistake.value)


@pytest.mark.parametrize("setting", FREE)
def test_what_does_not_affect_the_result_gives_no_alarm(setting: str) -> None:
    changes, said = checked((), setting.split())
    assert (changes, [line for line in said if "not read" not in line]) == ({}, [])


def test_each_other_key_affects_the_result() -> None:
    """The schema's marks, as a list that a new key has to be put into here, too."""
    free = {
        "train.max_steps train.log_every train.eval_every train.eval_batches",
        "train.recompute train.sample_every train.sample_prompt",
        "train.cuda_graphs",
        "optimizer.reference_batch optimizer.shard optimizer.momentum schedule.cooldown_steps",  # momentum: but of muon
        "optimizer.ema batch.double_at",  # where there is none: runs of before keep their names
        "health.spike_window health.max_skips",  # where there is no window, or no rollback
        "health.hang_seconds health.straggler_ratio health.notify profile.steps track observers",
        "model.init_from data.workers data.path data.tokenizer data.cache_dir data.cache_timeout_seconds",
    }
    of_text = {k for k in keys({}) if k.partition(".")[0] not in ("run", "world", "snapshot", "launch", "resume")}
    assert affecting.settings(configured().model_dump())[1] == of_text - set(" ".join(free).split())


def test_another_experiment_is_refused_and_who_says_so_goes_on() -> None:
    assert "optimizer.ema" in refused((), ("optimizer.ema=0.9",))  # it is state
    assert "optimizer.ema" in refused(("optimizer.ema=0.9",), ())
    assert "data.sha256: eee" in refused((), (), fingerprint={**NUMERICS, "data": "e" * 64})
    changes, said = checked((), ("seed=2", "resume.changed=true"))
    assert changes == {"seed": [1, 2]}
    assert "seed: 1 -> 2" in said[0]
    changes, [line] = checked((), (), fingerprint={**NUMERICS, "torch": "1"})  # another machine
    assert (changes, "torch: 1 -> 2" in line) == ({}, True)


def test_a_strangers_manifest_is_refused_in_lines_of_ours() -> None:
    config = configured().model_dump() | {"seed": "1\n\033[2Jfinished: step 200"}
    message = refused((), (), config=config)
    assert "\033" not in message
    assert "\n  seed: 1\\n\\x1b[2Jfinished: step 200 -> 1\n" in message
    nonsense: dict[str, Any] = {"optimizer": 3, "schedule": {"kind": []}, "batch": {"global_size": -1}, "model": []}
    assert "with other settings" in refused((), (), config=nonsense)


def test_an_extension_tells_both_learning_rates_and_the_way_out(told: Told) -> None:
    short, long = ((f"train.max_steps={n}", "schedule.warmup_steps=9") for n in (100, 1000))
    told(refused(short, long, step=100))
    assert checked(short, (*long, "schedule.decay_steps=100"), step=100) == ({}, [])


def test_another_batch_tells_where_in_the_data_the_next_step_begins() -> None:
    assert "step 201 begins at sample 19200, which skips 12800 to 19199" in refused(
        (), ("batch.global_size=128", "batch.double_at=[100]"), step=200
    )
    assert "step 201 begins at sample 6400, which repeats 6400 to 12799" in refused(
        (), ("batch.global_size=32",), step=200
    )


def test_a_schedule_that_differs_only_from_now_on_extends_the_run(told: Told) -> None:
    wsd = ("schedule=wsd", "schedule.warmup_steps=9", "schedule.cooldown_steps=20")
    short, long = ((*wsd, f"train.max_steps={n}") for n in (100, 1000))
    changes, said = checked(short, long, step=80)
    assert changes == {}
    told(*said)
    told(refused(short, long, step=81))  # one step of the decay is done
    assert "rewind" not in refused(short, (*long, "seed=2"), step=81)
    assert "optimizer.lr: 0.001 -> 1.0" in refused(short, (*long, "optimizer.lr=1"), step=80)
    assert checked(("schedule=constant",), ("schedule=wsd", "schedule.min_ratio=1"), step=500)[0] == {}


def test_a_run_is_extended_exactly_where_its_own_schedule_says_so() -> None:
    own = OWN, "schedule.warmup_steps=0"
    changes, [line] = checked(own, (*own, "schedule.decay_steps=900", "schedule.cooldown=0.3"), step=50)
    assert changes == {}
    assert line.endswith("the bits are those of a run planned so before")
    assert "schedule.cooldown: None -> 0.96" in refused(own, (*own, "schedule.cooldown=0.96"), step=50)


def test_code_that_a_snapshot_names_is_not_imported_for_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evilplan.py").write_text("def fall(step):\n    return 1")
    stored = configured("schedule._target_=evilplan.fall").model_dump()
    (tmp_path / "evilplan.py").write_text("raise SystemExit(3)")
    monkeypatch.delitem(sys.modules, "evilplan")
    for given in ((), (OWN,)):
        assert "schedule._target_: evilplan.fall -> " in refused((), given, config=stored)
    with pytest.raises(UserError, match=r"schedule\._target_ names code of one's own"):
        replay_config(stored, "runs/x")


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


def test_a_second_experiment_does_not_go_on_with_the_first_ones_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, how = str(tmp_path / "run"), RANDOM
    store = Store(f"{url}/snapshots")
    train_here(url, *how, "train.max_steps=4")
    assert attempt(settings_of(url, *how, "optimizer.lr=1"), Lifetime()) == USER_ERROR
    assert store.steps() == [4]
    # Extended under the same schedule, and then with another learning rate by permission.
    train_here(url, *how, "train.max_steps=6")
    train_here(url, *how, "train.max_steps=8", "optimizer.lr=1", "resume.changed=true")
    history = read(store, 8).manifest.history
    assert [entry.get("changes") for entry in history] == [None, None, {"optimizer.lr": [0.01, 1.0]}]
    assert cli.run("snapshots", ["show", url]) == 0
    assert "optimizer.lr: 0.01 -> 1.0" in capsys.readouterr().out
