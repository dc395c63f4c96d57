"""Names of other trainers whose meaning differs from the key of ours that looks like them."""

import pytest

from mingpt.config.names import unknown


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("min_lr", "set schedule.min_ratio, which is min_lr / optimizer.lr"),  # nanoGPT's is a rate, ours a share
        ("eval_iters", "an evaluation takes the whole validation split; data.val_fraction says how large that is"),
        ("dataset", "choose data=… (a group), or set data.path to a text of yours"),
        ("decay_lr", "decay_lr=false is schedule=constant"),
        ("wandb_log", "there are no trackers yet: metrics are JSON lines in run.dir/metrics"),
    ],
)
def test_no_key_of_another_meaning_is_named(name: str, answer: str) -> None:
    assert unknown(name, {}) == f"{name} is not a key: {answer}"
    assert unknown(f"train.{name}", {}) == f"train.{name} is not a key: {answer}"
