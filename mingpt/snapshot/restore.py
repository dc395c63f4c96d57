"""Restore the newest good step of either tier on any node, reading it once for the whole job.

One process reads and verifies each part and broadcasts its bytes; each process takes what it needs of it, and forgets
the rest. So a job of any size takes each byte from the durable store once, no process has all of it in memory, and a
replaced node gets the hot tier's step from a node that has it.
"""

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import chain, islice

from torch import Tensor

from mingpt.cli.console import Say
from mingpt.errors import Damaged, TransientError, Unreadable, UserError
from mingpt.snapshot.format import Kind, Manifest, decode_part
from mingpt.snapshot.lineage import NewestDurable, stale_steps
from mingpt.snapshot.manifest import decode_manifest, encode_manifest
from mingpt.snapshot.reader import PARALLEL_PARTS, ReadPart, kind_of, read_manifest, read_parts
from mingpt.snapshot.store import Store
from mingpt.world.world import World

Put = Callable[[Kind, dict[str, Tensor]], None]
Take = Callable[[Manifest], Put]


@dataclass(frozen=True)
class Restored:
    """Which snapshot was taken over. url: of the store that it came from, without secrets."""

    manifest: Manifest
    url: str


def restore(
    durable: Store, hot: Store | None, world: World, log: Say, newest: NewestDurable, take: Take, readers: Sequence[int]
) -> Restored | None:
    """Take over the newest good snapshot, in every process; None if there is none. Called by all processes.

    readers: the ranks that see the durable store, rank 0 among them.
    take: called with the manifest of the snapshot that is to be read; what it returns is called with the tensors of
    each part, in CPU memory. If a later part is damaged, `take` is called again, with the manifest of an older
    snapshot. If None is returned, what `take` has put so far is of a damaged one.

    A damaged snapshot is set aside and logged, and the next older one is tried. newest: the newest durable snapshot;
    hot snapshots that do not continue it are removed. Raises UserError in all processes if one of them has met one, and
    TransientError if snapshots are there and none can be read.
    """
    # Rank 0's listing for all: a bucket's listings may differ from one moment to the next.
    durable_steps: list[int] = world.run_on_main(durable.steps)
    if hot and world.local_rank == 0:
        _remove_stale(hot, newest, log)
    world.barrier()  # the node's other processes must not list what is being deleted
    damaged, unreadable = False, dict[int, str]()  # why, by step; these stay where they are, since they may be good
    while True:
        # Listed anew each time: a node sets its own damaged copies aside, and another one's may still be good.
        own = [step for step in hot.steps() if step not in unreadable] if hot else []
        hot_steps: list[list[int]] = world.gather(own)
        step = max([*durable_steps, *chain(*hot_steps)], default=None)
        if step is None and unreadable:
            # Not the start of a new run, which would in the end delete what nobody can read now.
            raise TransientError(f"{durable.shown}: no snapshot can be read: {unreadable[max(unreadable)]}")
        if step is None:
            if damaged and world.is_main:
                log(f"{durable.url}: no snapshot is left: training starts from step 1")
            return None
        # The hot tier first: it costs no traffic of the durable store.
        holders = [rank for rank, steps in enumerate(hot_steps) if step in steps]
        store = hot if hot and holders else durable
        outcome = _read_together(store, step, holders or readers, world, take)
        if isinstance(outcome, Restored):
            return outcome
        finders = list[int]()  # ranks
        for rank, finding in enumerate(outcome):
            if finding.unreadable:
                unreadable.setdefault(step, finding.unreadable)
            if finding.damage:
                finders.append(rank)
                damaged = True
        if step in unreadable:
            durable_steps = [s for s in durable_steps if s != step]
            if world.is_main:
                what = f"UNREADABLE SNAPSHOT of step {step}: {unreadable[step]}"
                log(f"{what}. It stays as it is; trying the next older one.")
            continue
        if not holders:
            durable_steps.remove(step)
            finders = finders[:1]  # all readers see the same store: one of them sets it aside
        if world.rank in finders:
            _set_damaged_aside(store, step, str(outcome[world.rank].damage), log)
        world.barrier()


def _remove_stale(hot: Store, newest: NewestDurable, log: Say) -> None:
    for stale in stale_steps(hot, newest):
        log(
            f"the hot snapshot of step {stale} does not continue what is durable now (step {newest.step}), as far "
            f"as its note tells: it was overtaken, or somebody went back: removed"
        )
        hot.delete(stale)


def _set_damaged_aside(store: Store, step: int, damage: str, log: Say) -> None:
    with store.named_errors(), suppress(FileNotFoundError):  # another process of the node was faster
        name = store.set_aside(step)
        log(
            f"DAMAGED SNAPSHOT of step {step} in {store.url}: {damage}. Set aside (its manifest is now {name}); "
            f"trying the next older one."
        )


@dataclass
class _Finding:
    """What one process has found at a step. Travels to the others as JSON."""

    digest: str | None = None  # of the snapshot that it has
    damage: str | None = None  # what is wrong with it: it is set aside
    unreadable: str | None = None  # why it can't be had now: it stays
    problems: tuple[str, ...] = ()  # of a UserError


def _find(world: World, act: Callable[[], str | None]) -> list[_Finding]:
    """What each process finds in `act`, by rank; `act` returns a digest. Raises UserError in all if one raises it."""
    # No process may leave here by an exception of its own: the others would wait for it until their time limit.
    try:
        finding = _Finding(digest=act())
    except Damaged as error:
        finding = _Finding(damage=str(error))
    except Unreadable as error:
        finding = _Finding(unreadable=str(error))
    except UserError as error:
        finding = _Finding(problems=error.problems)
    findings = [_Finding(**other) for other in world.gather(asdict(finding))]
    for other in findings:
        if other.problems:
            raise UserError(*other.problems)
    return findings


def _read_together(
    store: Store, step: int, holders: Sequence[int], world: World, take: Take
) -> Restored | list[_Finding]:
    """The snapshot of one step; if it is damaged or unreadable, what each process has found.

    holders: the ranks that can see it in their store; they share the parts among them.
    """
    own = list[Manifest]()

    def read_own() -> str | None:
        if world.rank in holders:
            own.append(read_manifest(store, step))
        return own[0].digest if own else None

    findings = _find(world, read_own)
    # Nodes with different numerics may hold different bits of one step. The lowest rank's digest is taken.
    digest = next((finding.digest for finding in findings if finding.digest), None)
    if digest is None:
        return findings
    readers = [rank for rank, finding in enumerate(findings) if finding.digest == digest]
    text = encode_manifest(own[0]).decode() if world.rank == readers[0] else None
    manifest = decode_manifest(world.gather(text)[readers[0]].encode())
    put, names = take(manifest), sorted(manifest.parts)
    # Each reader takes every len(readers)-th part, so one file system or bucket is read by all of them at a time.
    mine = names[readers.index(world.rank) :: len(readers)] if world.rank in readers else []
    with closing(read_parts(store, manifest, mine, ahead=max(1, PARALLEL_PARTS // len(readers)))) as parts:
        for first in range(0, len(names), len(readers)):
            part = list[ReadPart]()  # this process's of those that are broadcast next, if it has one

            def read_next(into: list[ReadPart] = part) -> None:
                into.extend(one for _, one in islice(parts, 1))

            # Before the broadcasts: a reader that can't read its part would leave the others in the middle of them.
            findings = _find(world, read_next)
            if any(f.damage or f.unreadable for f in findings):
                return findings
            for name, reader in zip(names[first:], readers, strict=False):
                raw, tensors = part[0] if reader == world.rank else (None, None)
                received = world.broadcast_bytes(raw, reader, manifest.parts[name].size)
                put(kind_of(name), decode_part(manifest, name, received) if tensors is None else tensors)
    return Restored(manifest, world.gather(store.url)[readers[0]])
