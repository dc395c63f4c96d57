"""Forks: a run whose first snapshot is a step of another run. Its parts are the parent's, shared by content."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from pydantic import TypeAdapter

from mingpt.config.configfile import create_config
from mingpt.config.schema import Config
from mingpt.errors import Damaged, UserError
from mingpt.redact import without_secrets
from mingpt.snapshot import hot
from mingpt.snapshot.attempts import Count, make_run_dir, newest_number, records
from mingpt.snapshot.format import Manifest
from mingpt.snapshot.manifest import encode_manifest
from mingpt.snapshot.reader import PARALLEL_PARTS, copy_part, manifest_or_none, read_manifest
from mingpt.snapshot.store import SNAPSHOTS, Store

FORK = "fork"  # an attempt's entry in the history that has this field is no attempt: the run begins there


@dataclass(frozen=True)
class Parent:
    """The snapshot that a run was forked from. id: of the parent run, if it has one. dir: where it was.

    claim: the id of the claim of the attempt that wrote it, which no other run has. keys: what the fork's command line
    has changed.
    """

    run: str
    id: str | None
    dir: str
    step: Count
    digest: str
    attempt: Count
    claim: str | None = None
    keys: tuple[str, ...] = ()


PARENT = TypeAdapter(Parent)


def parent_of(manifest: Manifest | None) -> Parent | None:
    """The parent of the run that a snapshot belongs to. A manifest may be a stranger's: nothing in it is believed."""
    entries = [h[FORK] for h in (manifest.history if manifest else ()) if isinstance(h.get(FORK), dict)]
    if not entries or entries[-1].keys() != Parent.__annotations__.keys():
        return None
    try:
        return PARENT.validate_json(json.dumps(entries[-1]), strict=True)
    except ValueError:
        return None


def new_named(manifest: Manifest) -> Parent | None:
    """The parent of a fork that has not trained yet: its keys may differ from the snapshot's config."""
    return parent_of(manifest) if manifest.history and FORK in manifest.history[-1] else None


def run_of(store: Store) -> str:
    """The run's directory, for a store in its usual place; else the store's own URL."""
    return store.given.removesuffix(f"/{SNAPSHOTS}")


def fork(
    source: Store,
    manifest: Manifest,
    config: Config,
    keys: Sequence[str],
    changes: Mapping[str, list[Any]],
    log: Callable[[str], None],
) -> None:
    """Make the first snapshot of the run of `config`. Its parts are shared with the parent's where that can be.

    keys, changes: what the fork's command line has changed; of these, what affects the result, with both values.
    config.yaml comes first, and names the one fork that may go on there: of two at once, the other ends here. An
    interrupted fork can be made again. Raises UserError if a run is there already, or the snapshot is damaged.
    """
    run_dir, target = config.run.dir, Store(config.snapshot.dir)
    parent = Parent(
        run=manifest.run,
        id=hot.find_run_id(run_of(source)),
        dir=without_secrets(run_of(source)),
        step=manifest.step,
        digest=manifest.digest,
        attempt=manifest.attempt,
        claim=claim.id if (claim := records(run_of(source)).get(manifest.attempt)) else None,
        keys=tuple(keys),
    )

    if target.root.startswith(f"{source.root}/"):
        raise UserError(f"{without_secrets(run_dir)} lies in the parent's snapshots: give a place of its own")

    def check() -> None:
        others = {*target.folders()} - {manifest.step}
        theirs = manifest_or_none(target, manifest.step) if manifest.step in target.steps() else None
        if others or newest_number(run_dir) or (theirs and parent_of(theirs) != parent):
            what = f"{without_secrets(run_dir)}: a run is there already"
            raise UserError(f"{what}, and it stays: give a place of its own")

    check()
    make_run_dir(run_dir)
    create_config(config, f"fork of step {manifest.step}, digest {manifest.digest}")
    hot.run_id(run_dir)
    entry = {
        "attempt": manifest.attempt + 1,
        "from_step": manifest.step,
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "numerics": manifest.fingerprint,
        FORK: asdict(parent) | {"keys": [*keys]},
        **({"changes": {**changes}} if changes else {}),
    }
    ours = manifest.model_copy(update={"run": config.run.name, "history": [*manifest.history, entry]})
    try:
        log(_take(source, target, manifest))
    except Damaged as damage:
        raise UserError(f"{source.folder_url(manifest.step)}: {damage}: choose another step") from damage
    with target.named_errors():
        target.commit(manifest.step, encode_manifest(ours))
    check()  # another process may have committed first: the same fork, or another run


def _take(source: Store, target: Store, manifest: Manifest) -> str:
    """Have all parts in the target. Returns how, in words. Raises Damaged."""

    def take(name: str) -> bool:
        with source.named_errors():
            source.check_size(manifest.step, name, manifest.parts[name].size)
            try:
                shared = target.share(source, manifest.step, name)
            except FileNotFoundError as error:
                raise Damaged(f"{name} is missing") from error
        if not shared:
            copy_part(source, target, manifest, name)
        return shared

    with ThreadPoolExecutor(PARALLEL_PARTS) as pool:
        shared = [*pool.map(take, sorted(manifest.parts))]
    size = sum(part.size for part in manifest.parts.values())
    read_manifest(source, manifest.step)  # if the run has deleted it meanwhile, a part may be missing
    if not all(shared):
        return f"{len(shared)} parts, {size:,} bytes: copied, since the parent's place can't share them with this one"
    how = "the same files as the parent's (hard links)" if target.local else "copied by the store itself"
    return f"{len(shared)} parts, {size:,} bytes: {how}"
