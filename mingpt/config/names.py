"""What to say of a key that there is not: what to use in its place, or the nearest one."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from mingpt.cli.console import printable
from mingpt.config.keys import held_at, keys, kind_of, kinds_at, kinds_having, named

# As nanoGPT and others call them.
OTHERS = {
    "learning_rate": "optimizer.lr",
    "batch_size": "batch.global_size",
    "max_iters": "train.max_steps",
    "eval_interval": "train.eval_every",
    "warmup_iters": "schedule.warmup_steps",
    "grad_clip": "optimizer.clip_norm",
    "out_dir": "run.dir",
}


def nearest(name: str) -> str | None:
    """The key that a name without a section may mean, or one that is mistyped."""
    section, _, leaf = name.rpartition(".")
    return OTHERS.get(name) or _nearest(section, leaf, {})


def unknown(key: str, raw: Mapping[Any, Any], in_file: bool = False) -> str:
    """What to say of a key that a plain config may not have. in_file: a file sets it, not the command line."""
    section, _, name = key.rpartition(".")
    shown, cure = printable(key), "leave it out"
    if in_file:
        shown, cure = f"{shown} (a file sets it)", f"write ~{shown}"
    if having := kinds_having(section, name):
        return (
            f"{shown} is not a key of {section}.kind={kind_of(section, held_at(section, raw))}, only of "
            f"{', '.join(having)}: {cure}, or choose {section}.kind={having[0]}"
        )
    close = OTHERS.get(key) or _nearest(section, name, raw)
    return f"{shown} is not a key{f' (did you mean {close}?)' if close else ''}"


def _nearest(section: str, name: str, raw: Mapping[Any, Any]) -> str | None:
    there_are = keys(raw) | keys()
    for kind in kinds_at(section).values():
        there_are |= {f"{section}.{key}": "" for key in named(kind)}
    by_name, inside = dict[str, str](), list[str]()
    for key in there_are:
        holder, _, own = key.rpartition(".")
        by_name[own] = key
        if holder == section:
            inside.append(own)
    for key in there_are:  # a section's own name, too
        top = key.partition(".")[0]
        by_name[top] = top
    if close := get_close_matches(name, inside, n=1, cutoff=0.7):  # a slip in the name, section right
        return f"{section}.{close[0]}"
    close = get_close_matches(name, list(by_name), n=1, cutoff=0.7)
    return by_name[close[0]] if close else None
