"""What to say of a key that there is not: the nearest one, or what people type who come from elsewhere."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from mingpt.config.keys import held_at, keys, kind_of, kinds_at, kinds_having, named
from mingpt.redact import printable, without_secrets

# Other trainers' names of a key of ours.
ALIASES = {
    alias: key
    for key, names in {
        "batch.global_size": "batch_size global_batch_size train_batch_size total_batch_size",
        "batch.micro_size": "micro_batch_size device_batch_size per_device_batch_size per_device_train_batch_size",
        "data.path": "data_dir data_path dataset_path train_file",
        "data.workers": "num_workers dataloader_num_workers",
        "model.block_size": "seq_len seq_length sequence_length max_seq_len max_seq_length context_length n_ctx "
        "n_positions max_position_embeddings",
        "model.init_from": "model_name_or_path pretrained",
        "model.n_embd": "hidden_size d_model n_embed embed_dim",
        "model.n_head": "num_heads n_heads num_attention_heads",
        "model.n_layer": "num_layers n_layers num_hidden_layers",
        "optimizer.beta1": "adam_beta1",
        "optimizer.beta2": "adam_beta2",
        "optimizer.clip_norm": "grad_clip max_grad_norm gradient_clip_val",
        "optimizer.eps": "adam_epsilon epsilon",
        "optimizer.lr": "learning_rate max_lr",
        "precision": "bf16 fp16 tf32 dtype mixed_precision amp",
        "run.dir": "out_dir output_dir save_dir",
        "run.name": "run_name experiment_name",
        "schedule.decay_steps": "lr_decay_iters lr_decay_steps",
        "schedule.kind": "lr_scheduler lr_scheduler_type lr_schedule scheduler",
        "schedule.min_ratio": "min_lr_ratio",
        "schedule.warmup_steps": "warmup_iters num_warmup_steps lr_warmup_steps",
        "snapshot.dir": "checkpoint_dir",
        "snapshot.every_steps": "checkpoint_every checkpoint_interval save_every save_interval save_steps",
        "snapshot.keep": "keep_last save_total_limit",
        "train.compile": "torch_compile",
        "train.eval_every": "eval_interval eval_steps val_interval",
        "train.log_every": "log_interval logging_steps log_every_n_steps",
        "train.max_steps": "max_iters num_steps num_train_steps total_steps train_steps",
    }.items()
    for alias in names.split()
}
# Names of what is no key of ours, and what to do in its place.
INSTEAD = {
    alias: cure
    for names, cure in {
        "epochs max_epochs num_epochs num_train_epochs": "set train.max_steps: a run is so many steps long, and an "
        "epoch is as many as the samples of the data / batch.global_size",
        "accumulate_grad_batches grad_accum_steps gradient_accumulation_steps": "set batch.global_size and "
        "batch.micro_size: each process accumulates its share of their quotient",
        "dataset": "choose data=… (a group), or set data.path to a text of yours",
        "vocab_size": "it follows from the data: set data.tokens; model.vocab_multiple pads it",
        "warmup_ratio": "set schedule.warmup_steps, a number of steps",
        "resume_from resume_from_checkpoint": "start with the same run.dir, which resumes; model.init_from starts a "
        "run of its own from weights",
        "min_lr": "set schedule.min_ratio, which is min_lr / optimizer.lr",
        "decay_lr": "decay_lr=false is schedule=constant",
        "eval_iters": "an evaluation takes the whole validation split; data.val_fraction says how large that is",
        "always_save_checkpoint": "set snapshot.every_steps; snapshot.keep_best keeps the best one",
        "wandb_log wandb_project report_to": "there are no trackers yet: metrics are JSON lines in run.dir/metrics",
        "gpus num_gpus num_nodes nproc_per_node world_size": "start as many processes: mingpt launch "
        "--nnodes=… --nproc-per-node=…",
    }.items()
    for alias in names.split()
}


def unknown(key: str, raw: Mapping[Any, Any], in_file: bool = False) -> str:
    """What to say of a key that a plain config may not have. in_file: a file sets it, not the command line."""
    section, _, name = key.rpartition(".")
    told, cure = printable(without_secrets(key)), "leave it out"
    if in_file:
        told, cure = f"{told} (a file sets it)", f"write ~{told}"
    if having := kinds_having(section, name):
        return (
            f"{told} is not a key of {section}.kind={kind_of(section, held_at(section, raw))}, only of "
            f"{', '.join(having)}: "
            f"{cure}, or choose {section}.kind={having[0]}"
        )
    told = f"{told} is not a key"
    if name in INSTEAD:
        return f"{told}: {INSTEAD[name]}"
    nearest = _nearest(section, name, raw) if "." in section else ALIASES.get(name) or _nearest(section, name, raw)
    return f"{told} (did you mean {nearest}?)" if nearest else told


def _nearest(section: str, name: str, raw: Mapping[Any, Any]) -> str | None:
    inside = {f"{section}.{k}": "" for kind in kinds_at(section).values() for k in named(kind)}
    there_are = {**keys(raw), **keys(), **inside}
    by_name = {k.rpartition(".")[2]: k for k in there_are}
    own = [k.rpartition(".")[2] for k in there_are if k.startswith(f"{section}.")]  # a slip in the name, section right
    if close := get_close_matches(name, own, n=1, cutoff=0.7):
        return f"{section}.{close[0]}"
    close = get_close_matches(name, list(by_name), n=1, cutoff=0.7)
    return by_name[close[0]] if close else None
