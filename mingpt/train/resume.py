"""Checks that a snapshot belongs to this run: the same settings, the same model, the same vocabulary.

A run is one experiment. A resume may change a setting that affects the result only with resume.changed=true. The schema
marks these settings (config/affecting.py). The data's place is none of them; its content is.
"""

from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

from pydantic import ValidationError
from torch import nn

from mingpt.cli.console import Say, printable
from mingpt.compute.batches import position
from mingpt.compute.guard import guard_layout
from mingpt.compute.layout import layout_of, misfits, state_layout
from mingpt.compute.numerics import changes as numerics_changes
from mingpt.compute.numerics import differences
from mingpt.compute.optimizer import Method, batch_factor, schedule_factor
from mingpt.compute.rules import muon_names, roles
from mingpt.config.affecting import section_of, settings
from mingpt.config.configfile import public_config
from mingpt.config.keys import Raw, declared, filled
from mingpt.config.schema import Batch, Config, Optimizer, OwnSchedule, Schedule
from mingpt.data.source import Source, sampled_split
from mingpt.errors import UserError
from mingpt.snapshot.attempts import Parent, new_named
from mingpt.snapshot.format import Manifest
from mingpt.train.evaluation import evaluated_part
from mingpt.train.preparing import some
from mingpt.world.world import World

Changes = dict[str, list[Any]]  # by key: the old value and the new one
INIT_FROM = "model.init_from"
SCHEDULE = "schedule."
LONGEST = 100  # characters of a value in a message


def check(manifest: Manifest, config: Config, numerics: Mapping[str, Any], world: World, say: Say) -> Changes:
    """The settings that have changed since the snapshot, for the history. Rank 0 prints them. Collective.

    Raises UserError in all processes if one of them affects the result and resume.changed does not allow it.
    """
    step, before, after = manifest.step, manifest.config, public_config(config)

    def find() -> Changes:
        changes = changed(before, after)
        if fork := new_named(manifest):
            changes = _not_named(fork, changes, after, say)
        # A longer run with the same past is no other experiment: its bits are those of a run planned so from the start.
        if any(key.startswith(SCHEDULE) for key in changes) and same_past(manifest, config, step):
            planned = {key: changes.pop(key) for key in [*changes] if key.startswith(SCHEDULE)}
            say(f"from step {step + 1} on, {', '.join(_lines(planned))}: the bits are those of a run planned so before")
        # The data's content by its hash, since the same place may have other content, and another place the same.
        other_data = fork is not None and any(key.startswith("data.") for key in fork.keys)
        if manifest.fingerprint.get("data") != numerics["data"] and not other_data:
            changes["data.sha256"] = [manifest.fingerprint.get("data"), numerics["data"]]
        if changes and not config.resume.changed:
            lines = _lines(changes) + consequences(manifest, config, changes, world)
            raise UserError(_refusal(manifest, config, lines, _extension(manifest, config, changes)))
        return changes

    # In rank 0 alone: what counts as a secret depends on the process's environment, and all must decide alike.
    changes: Changes = world.run_on_main(find)
    if not world.is_main:
        return changes
    # Another machine is no change of the experiment, so this is printed, and the run goes on.
    different, unrecorded = numerics_changes(manifest.fingerprint, dict(numerics))
    # The data's content is a change of the experiment, and was judged above.
    found = [line for line in different if not line.startswith("data: ")]
    if found:
        say(f"the numerics changed ({', '.join(found)}): after step {step}, equality with an undisturbed run ends")
    if unrecorded:
        say(f"an older mingpt wrote step {step} and did not record {', '.join(unrecorded)}: they may have changed")
    if changes:
        shown = ", ".join(_lines(changes) + consequences(manifest, config, changes, world))
        say(f"the config changed ({shown}): after step {step}, equality with an undisturbed run ends")
    for moved in differences(
        section_of(before, "model").get("init_from"), section_of(after, "model").get("init_from"), INIT_FROM
    ):
        say(f"{moved}: not read, since the weights are those of step {step}")
    return changes


def _not_named(fork: Parent, changes: Changes, after: Raw, say: Say) -> Changes:
    """The changes that the fork's own command line has not made. The history has those already."""
    named = {key: found for key, found in changes.items() if key in fork.keys}
    if named:
        say(f"forked from step {fork.step} of {printable(fork.run)} with {', '.join(_lines(named))}")
    return {key: found for key, found in changes.items() if key not in named}


def changed(before: Raw, after: Raw) -> Changes:
    """The keys that affect the result and whose values differ in two plain configs."""
    (old, affecting_old), (new, affecting_new) = settings(before), settings(after)
    return {
        key: [old.get(key), new.get(key)]
        for key in sorted(affecting_old | affecting_new)
        if old.get(key) != new.get(key)
    }


def same_past(manifest: Manifest, config: Config, step: int) -> bool:
    """Whether the schedule of the snapshot and the config's are equal in all steps up to `step`.

    Then the state is that of a run that was planned so from the start: the run is extended, not changed.
    """
    schedule = _schedule(manifest, config)
    if schedule is None:
        return False
    # Step by step, not key by key: decay_steps may change while the rate is still constant, for instance.
    return all(schedule_factor(schedule, s) == schedule_factor(config.schedule, s) for s in range(step))


def other_validation(manifest: Manifest, config: Config, source: Source) -> str:
    """What to say if evaluations take other samples than those up to the snapshot; otherwise nothing.

    Their losses can't be compared. A config without train.eval_batches is of a version that took the whole split.
    """
    now, (data, before) = validation_of(config, source), manifest.validated_on
    if not now:
        return ""
    if before is None and section_of(manifest.config, "train").get("eval_batches", 0) == 0:
        before = [now[1]] * 2
    if (data, before) == (source.sha256, now):
        return ""
    took = "of other data" if data != source.sha256 else f"and took {before[0]}" if before else "not the same as before"
    return (
        f"train.eval_batches: evaluations take {now[0]} of {now[1]} samples from now on, {took}: the best validation "
        f"loss begins anew"
    )


def validation_of(config: Config, source: Source) -> list[int] | None:
    """How many samples of how many an evaluation takes; None: there is nothing to evaluate on."""
    if not len(source.validation):
        return None
    part = evaluated_part(source.validation, config.train.eval_batches)
    return [part.size, sampled_split(source.validation).size]


def _schedule(manifest: Manifest, config: Config) -> Schedule | None:
    """The snapshot's. Code of the user's own is not imported because that names it, only if the config does, too."""
    values = filled(manifest.config)["schedule"]
    target = values["_target_"]
    if target not in ("", config.schedule.target):
        return None
    try:
        return (OwnSchedule if target else Schedule)(**values)
    except ValidationError:  # a manifest of another version, or a damaged one
        return None


def _extension(manifest: Manifest, config: Config, changes: Changes) -> list[str]:
    """The way to extend a run that has begun to decay, if only its schedule has changed, and only after that."""
    schedule = _schedule(manifest, config)
    if schedule is None or not (0 < schedule.stable_until < manifest.step):
        return []
    if not all(key.startswith(SCHEDULE) for key in changes) or not same_past(manifest, config, schedule.stable_until):
        return []
    here = config.run.dir
    return [
        f"  `mingpt snapshots rewind {here} --step {schedule.stable_until}`, and the same command goes on from the end "
        f"of the stable phase, with the bits of a run planned so before;"
    ]


def _lines(changes: Changes) -> list[str]:
    return [f"{printable(key)}: {_shown(old)} -> {_shown(new)}" for key, (old, new) in changes.items()]


def _shown(value: Any) -> str:
    text = printable(str(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def consequences(manifest: Manifest, config: Config, changes: Changes, world: World) -> list[str]:
    """What some changes do to the next step: the samples that it skips or repeats, and its learning rate."""
    step, before, notes = manifest.step, filled(manifest.config), list[str]()
    if changes.keys() & {"optimizer.name", "optimizer._target_"}:
        notes.append("what the other optimizer remembers of a parameter is not known to this one, and begins anew")
    with suppress(ValidationError):  # a manifest of another version, or a damaged one
        optimizer, schedule = Optimizer(**declared("optimizer", before)), _schedule(manifest, config)
        batch = Batch(**before["batch"])
        if batch.per_process_size is None and config.batch.per_process_size is None:
            old_size, new_size = batch.global_size, config.batch.global_size
            old_at, new_at = (position(step, b.global_size, b.double_at) for b in (batch, config.batch))
            if old_at != new_at:
                first, last = sorted((old_at, new_at))
                what = "skips" if new_at > old_at else "repeats"
                notes.append(f"step {step + 1} begins at sample {new_at}, which {what} {first} to {last - 1}")
        else:
            old_size = new_size = config.global_size(world.size)
        if schedule is None:
            return notes
        old = optimizer.lr * batch_factor(optimizer, old_size) * schedule_factor(schedule, step)
        new = config.optimizer.lr * batch_factor(config.optimizer, new_size) * schedule_factor(config.schedule, step)
        if old != new:
            keep = f"; schedule.decay_steps={schedule.decay_steps} keeps the old schedule"
            note = f"the learning rate of step {step + 1} becomes {new:.2e}, and would have been {old:.2e}"
            notes.append(note + (keep if "schedule.decay_steps" in changes else ""))
    return notes


def _refusal(manifest: Manifest, config: Config, lines: list[str], extension: list[str]) -> str:
    here, step = config.run.dir, manifest.step
    return "\n".join(
        [
            f"run.dir={here} has step {step} with other settings, and these affect the result:",
            *(f"  {line}" for line in lines),
            "Set them back, or choose:",
            *extension,
            "  another run.name (or run.dir) starts a run of its own;",
            f"  resume.changed=true goes on from step {step} with the new values, and the history records both;",
            f"  `mingpt fork {here}@{step} NEW key=value …` goes on with other values in a run of its own",
        ]
    )


def check_fits(
    manifest: Manifest, config: Config, vocabulary: Mapping[str, Any], model: nn.Module, own: Method | None = None
) -> None:
    """Raise UserError unless the snapshot is one of this model over this vocabulary. own: the user's own optimizer."""
    where = f"the snapshot of step {manifest.step} in {config.snapshot.dir}"
    cure = "set the keys back, or take another run.dir"
    # First: with another vocabulary the model's sizes differ, too, and that message would name the wrong key.
    if manifest.vocabulary != vocabulary:
        changed = differences(manifest.config.get("data"), public_config(config)["data"], "data")
        raise UserError(
            f"{where} has another vocabulary than the data ({', '.join(changed) or 'which changed'}): {cure}"
        )
    model_problems = misfits(layout_of(model.state_dict()), manifest.layout("model"))
    if model_problems:
        changed = differences(manifest.config.get("model"), config.model.model_dump(), "model")
        raise UserError(f"{where} is one of another model ({', '.join(changed) or some(model_problems)}): {cure}")
    # Expect what the snapshot's own config implies: train.freeze or the precision may have changed since.
    frozen, fp16 = _freeze_and_fp16(manifest.config)
    named = list[tuple[str, nn.Parameter]]()
    for name, parameter in model.named_parameters():
        if not any(fnmatchcase(name, pattern) for pattern in frozen):
            named.append((name, parameter))
    stored = manifest.layout("optimizer")
    optimizer = section_of(manifest.config, "optimizer")
    target = optimizer.get("_target_") or ""
    if target and target != config.optimizer.target:
        # What that one has stored is not known without its code, which is not imported because a snapshot names it.
        return
    of_muon = muon_names(str(optimizer.get("name")), roles(model))
    layout = state_layout(named, fp16, of_muon, own.shapes if own and target else None, bool(optimizer.get("ema")))
    if problems := misfits(layout | guard_layout(list(stored)), stored):
        raise UserError(
            f"{where} does not have this optimizer's state: {some(problems)}: go on from another snapshot "
            f"(set this one's folder aside), or take another run.dir"
        )


def _freeze_and_fp16(config: dict[str, Any]) -> tuple[list[str], bool]:
    """(train.freeze, whether the precision is fp16) of a manifest's config, whose types are not validated."""
    frozen = list[str]()
    patterns = section_of(config, "train").get("freeze")
    if isinstance(patterns, list):
        frozen = [pattern for pattern in patterns if isinstance(pattern, str)]
    return frozen, config.get("precision") == "fp16"
