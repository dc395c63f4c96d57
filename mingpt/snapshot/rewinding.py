"""Go back: the run continues from an older step, and nothing computed after that step comes back by itself."""

from collections.abc import Callable, Iterator, Mapping

from mingpt.errors import Damaged, OtherFormat, UserError
from mingpt.redact import without_secrets
from mingpt.snapshot import hot
from mingpt.snapshot.attempts import REWIND, Attempt, Record, line_of, records, without_undone
from mingpt.snapshot.format import Manifest
from mingpt.snapshot.lineage import is_on
from mingpt.snapshot.reader import damage_as, manifest_or_none, read_manifest
from mingpt.snapshot.store import REWOUND, Store


def rewind(
    run_dir: str,
    store: Store,
    step: int,
    hot_dir: str,
    log: Callable[[str], None],
    dropped: tuple[int, int] | None = None,
) -> None:
    """Make the next attempt start from `step`: set all newer snapshots aside, in the store and in this node's memory.

    The rewind is an attempt of its own. So an attempt that is still training commits nothing more, and the next start
    removes older hot snapshots from the memory of all nodes. dropped: batches (first, end) that no step shows any more.
    Raises UserError, before it changes anything, if `step` can't be read.
    """
    steps = store.steps()
    if step not in steps:
        shown = ", ".join(map(str, steps)) or "none"
        raise UserError(
            f"{store.url}: there is no snapshot of step {step}: choose one of those that there are ({shown})"
        )
    with damage_as(UserError, store, step, ": choose another step"):
        manifest = read_manifest(store, step)
    Attempt.claim(
        run_dir, step, manifest.digest, manifest.attempt, by=REWIND, above=_newest(store, manifest), dropped=dropped
    )
    _set_aside(run_dir, store, hot_dir, lambda tier, s: s > step, log)
    log(f"the next attempt starts from step {step}, digest {manifest.digest}")


def _newest(store: Store, manifest: Manifest) -> int:
    """The newest attempt that a snapshot names: with snapshot.dir set, run.dir may be new and have no claims."""
    return max([manifest.attempt, *(found.attempt for s in store.steps() if (found := manifest_or_none(store, s)))])


def _set_aside(
    run_dir: str, store: Store, hot_dir: str, which: Callable[[Store, int], bool], log: Callable[[str], None]
) -> None:
    memory = hot.find_hot(hot_dir, run_dir)
    for tier in (store, *([memory] if memory else [])):
        with tier.named_errors():
            for newer in [s for s in tier.steps() if which(tier, s)]:
                name = tier.set_aside(newer, REWOUND)
                log(f"step {newer}: set aside (its manifest is now {tier.folder_url(newer)}/{name})")


def rewound(store: Store, step: int, overtaken: bool = False) -> Iterator[tuple[str, Manifest]]:
    """The snapshots of a step that a rewind has set aside: the manifest's name now, and what it says.

    overtaken: those of overtaken attempts, too.
    """
    for file in store.files(step):
        if file.was_rewound or (overtaken and file.is_set_aside and not file.was_damaged):
            yield file.name, read_manifest(store, step, file.name)


def undo(run_dir: str, store: Store, hot_dir: str, log: Callable[[str], None]) -> None:
    """Take the newest rewind back: what it has set aside is committed again, and what came after it is set aside.

    Raises UserError, before it changes anything, if there is none, or nothing that can be brought back.
    """
    claims, shown = records(run_dir), without_secrets(run_dir)
    claim = claims.get(max(claims, default=0))
    back = _left_by(claims[claim.undoes], claims, store, log) if claim and claim.undoes in claims else {}
    if not back:  # the newest claim is no undoing that was interrupted
        number = _to_undo(claims)
        if not number:
            raise UserError(f"{shown}: no rewind is there that could be undone")
        back = _left_by(claims[number], claims, store, log)
        if not back:
            raise UserError(
                f"{shown}: the rewind to step {claims[number].from_step} can't be undone: nothing that it set aside "
                f"can be brought back"
            )
        newest = back[max(back)][1]
        claim = Attempt.claim(
            run_dir, newest.step, newest.digest, newest.attempt, by=REWIND, above=_newest(store, newest), undoes=number
        ).record
    assert claim is not None
    assert claim.undoes is not None
    line, start = line_of(claims, claim.undoes - 1), claims[claim.undoes].from_step

    def came_after(tier: Store, step: int) -> bool:
        found = manifest_or_none(tier, step)
        return step > start and not (found and is_on(line, found))

    _set_aside(run_dir, store, hot_dir, came_after, log)
    with store.named_errors():
        for step, (name, _) in sorted(back.items(), reverse=True):  # an attempt that starts meanwhile has the newest
            store.bring_back(step, name)
            log(f"step {step}: brought back")
    log(f"the next attempt starts from step {claim.from_step}, digest {claim.from_digest}")


def _to_undo(claims: Mapping[int, Record]) -> int:
    """The number of the newest rewind that was not undone; 0: there is none."""
    rewinds = (n for n, r in without_undone(claims).items() if r.by == REWIND and r.undoes is None)
    return max((n for n in rewinds if not _went_nowhere(claims, n)), default=0)


def _left_by(
    rewind: Record, claims: Mapping[int, Record], store: Store, log: Callable[[str], None]
) -> dict[int, tuple[str, Manifest]]:
    """What a rewind has set aside, and is aside now, by step, if it can be brought back."""
    line = line_of(claims, rewind.number - 1)
    steps = [step for step in store.folders() if step > rewind.from_step]
    return {step: found for step in steps if (found := _of_line(store, step, line, log))}


def _went_nowhere(claims: Mapping[int, Record], number: int) -> bool:
    """Whether the claim before this rewind is one to the same snapshot: it has set nothing more aside."""
    before, record = claims.get(number - 1), claims[number]
    at = record.from_step, record.from_digest
    return before is not None and before.by == REWIND and (before.from_step, before.from_digest) == at


def _of_line(
    store: Store, step: int, line: Mapping[int, tuple[int, int]], log: Callable[[str], None]
) -> tuple[str, Manifest] | None:
    """What a rewind has set aside of a step, and was on this line before, if its parts are still there."""
    try:
        for name, manifest in rewound(store, step):
            if is_on(line, manifest):
                for part, info in manifest.parts.items():
                    store.check_size(step, part, info.size)
                return name, manifest
    except (Damaged, OtherFormat) as problem:
        log(f"step {step}: can't be brought back: {problem}")
    return None
