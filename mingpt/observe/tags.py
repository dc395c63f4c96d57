"""The names that curves have in trackers, in groups as everybody has them: `train/loss`, `val/loss`, `perf/mfu`.

Metrics, and the events that observers get, have plain names (`loss`, `val_loss`): users read files of all versions.
"""

TAGS = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "tokens_seen": "train/tokens_seen",
    "skipped_in_a_row": "train/skipped_in_a_row",
    "sample": "train/sample",
    "val_loss": "val/loss",
    "val_accuracy": "val/accuracy",
    "val_bits_per_byte": "val/bits_per_byte",
    "val_tokens": "val/tokens",
    "val_share": "val/share",
    "tokens_per_second": "perf/tokens_per_second",
    "step_seconds": "perf/step_seconds",
    "seconds_left": "perf/seconds_left",
    "mfu": "perf/mfu",
    "peak_memory": "system/peak_memory",
    "world_size": "system/world_size",
}
OF_COMPONENT = "val_loss/"  # the loss on a component of a mixture


def tag(name: str) -> str:
    """Of a metric, what trackers call it."""
    if name.startswith(OF_COMPONENT):
        # No further slash: MLflow's folder has a file `val/loss`, which can't be a folder, too.
        return f"val/loss_{name.removeprefix(OF_COMPONENT)}"
    return TAGS[name]
