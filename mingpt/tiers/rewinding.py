"""Go back: a run continues from an older step, and nothing computed after it comes back by itself, in either tier."""

from collections.abc import Callable, Mapping

from mingpt.cli.console import Say
from mingpt.errors import Damaged, Unreadable, UserError
from mingpt.snapshot.attempts import REWIND, Attempt, Record, line_of, records, without_undone
from mingpt.snapshot.format import Manifest
from mingpt.snapshot.lineage import is_on, rewound
from mingpt.snapshot.reader import damage_as, manifest_or_none, read_manifest
from mingpt.snapshot.store import REWOUND, Store
from mingpt.tiers import hot

SetAside = dict[int, tuple[str, Manifest]]  # by step: the manifest's name there, and what it holds


def rewind(
    run_dir: str, store: Store, step: int, hot_dir: str, log: Say, dropped: tuple[int, int] | None = None
) -> None:
    """Make the next attempt start from `step`: set all newer snapshots aside, in the store and in this node's memory.

    The rewind is an attempt of its own. So an attempt that is still training commits nothing more, and the next start
    removes older hot snapshots from the memory of all nodes. dropped: batches (first, end) that no step shows any more.
    Raises UserError, before it changes anything, if `step` can't be read.
    """
    memory = hot.find_hot(hot_dir, run_dir)
    steps = store.steps()
    if step not in steps:
        shown = ", ".join(map(str, steps)) or "none"
        raise UserError(
            f"{store.url}: there is no snapshot of step {step}: choose one of those that there are ({shown})"
        )
    with damage_as(UserError, store, step, ": choose another step"):
        manifest = read_manifest(store, step)
    # The claim comes first: if this is killed after it, the next start sets the rest aside, as overtaken.
    _claim(run_dir, store, manifest, dropped, None)
    _set_rewound_aside(store, memory, lambda tier, s: s > step, log)
    log(f"the next attempt starts from step {step}, digest {manifest.digest}")


def _claim(run_dir: str, store: Store, to: Manifest, dropped: tuple[int, int] | None, undoes: int | None) -> Record:
    """Claim an attempt that continues from `to`."""
    newest = 0  # that a snapshot names: with snapshot.dir set, run.dir may be new and have no claims
    for step in store.steps():
        if other := manifest_or_none(store, step):
            newest = max(newest, other.attempt)
    return Attempt.claim(run_dir, to.step, to.digest, to.attempt, REWIND, newest, dropped, undoes).record


def _set_rewound_aside(store: Store, memory: Store | None, which: Callable[[Store, int], bool], log: Say) -> None:
    for tier in (store, *([memory] if memory else [])):
        with tier.named_errors():
            # Newest first: if this is killed half way, what is left is a line without a hole.
            for step in tier.steps():
                if which(tier, step):
                    name = tier.set_aside(step, REWOUND)
                    log(f"step {step}: set aside (its manifest is now {tier.folder_url(step)}/{name})")


def undo(run_dir: str, store: Store, hot_dir: str, log: Say) -> None:
    """Take the newest rewind back: what it has set aside is committed again, and what came after it is set aside.

    Raises UserError, before it changes anything, if there is none, or nothing that can be brought back.
    """
    memory, claims = hot.find_hot(hot_dir, run_dir), records(run_dir)
    back = SetAside()
    claim = claims.get(max(claims, default=0))
    if claim and claim.undoes in claims:
        # The newest claim is an undoing. If something is left of it to bring back, it was killed: go on with it.
        back = _left_by(claims, claim.undoes, store, log)
    if not back:
        number = _to_undo(claims)
        if not number:
            raise UserError(f"{run_dir}: no rewind is there that could be undone")
        back = _left_by(claims, number, store, log)
        if not back:
            raise UserError(
                f"{run_dir}: the rewind to step {claims[number].from_step} can't be undone: nothing that it set aside "
                f"can be brought back"
            )
        claim = _claim(run_dir, store, back[max(back)][1], None, number)
    assert claim is not None
    assert claim.undoes is not None
    line, start = line_of(claims, claim.undoes - 1), claims[claim.undoes].from_step

    def came_after(tier: Store, step: int) -> bool:
        found = manifest_or_none(tier, step)
        return step > start and not (found and is_on(line, found))

    _set_rewound_aside(store, memory, came_after, log)
    with store.named_errors():
        # The newest first: an attempt that starts meanwhile begins from it, as if all were back.
        for step, (name, _) in sorted(back.items(), reverse=True):
            store.bring_back(step, name)
            log(f"step {step}: brought back")
    log(f"the next attempt starts from step {claim.from_step}, digest {claim.from_digest}")


def _to_undo(claims: Mapping[int, Record]) -> int:
    """The number of the newest rewind that was not undone; 0: there is none."""
    newest = 0
    for number, record in without_undone(claims).items():
        if record.by == REWIND and record.undoes is None and not _went_nowhere(claims, number):
            newest = max(newest, number)
    return newest


def _left_by(claims: Mapping[int, Record], number: int, store: Store, log: Say) -> SetAside:
    """What a rewind has set aside of the line before it, and is aside now, by step, if its parts are still there."""
    line, left = line_of(claims, number - 1), SetAside()
    for step in store.folders():
        if step <= claims[number].from_step:
            break  # they come newest first
        try:
            for name, manifest in rewound(store, step, log):
                if is_on(line, manifest):
                    for part, info in manifest.parts.items():
                        store.check_size(step, part, info.size)
                    left[step] = name, manifest
                    break
        except (Damaged, Unreadable) as problem:
            log(f"step {step}: can't be brought back: {problem}")
    return left


def _went_nowhere(claims: Mapping[int, Record], number: int) -> bool:
    """Whether the claim before this rewind is one to the same snapshot: it has set nothing more aside."""
    before, record = claims.get(number - 1), claims[number]
    at = record.from_step, record.from_digest
    return before is not None and before.by == REWIND and (before.from_step, before.from_digest) == at
