"""Restore the newest good step of either tier on any node, reading it once for the whole job.

One process reads and verifies each part and broadcasts its bytes; each process takes what it needs of it, and forgets
the rest. So a job of any size takes each byte from the durable store once, no process has all of it in memory, and a
replaced node gets the hot tier's step from a node that has it.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass

from torch import Tensor

from mingpt.errors import Damaged, TransientError, Unreadable, UserError
from mingpt.snapshot.format import Kind, Manifest, decode_part
from mingpt.snapshot.lineage import Newest, stale_steps
from mingpt.snapshot.manifest import decode_manifest, encode_manifest
from mingpt.snapshot.reader import PARALLEL_PARTS, Part, kind_of, read_manifest, read_parts
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
    durable: Store, hot: Store | None, world: World, log: Callable[[str], None], newest: Newest, take: Take
) -> Restored | None:
    """Take over the newest good snapshot, in every process; None if there is none. Called by all processes.

    take: called with the manifest of the snapshot that is to be read; what it returns is called with the tensors of
    each part, in CPU memory. If a later part is damaged, `take` is called again, with the manifest of an older
    snapshot; if None is returned, what was put before is of a damaged one.

    A damaged snapshot is set aside and logged, and the next older one is tried. newest: the newest durable snapshot;
    hot snapshots that do not continue it are removed. Raises UserError in all processes if one of them has met one, and
    TransientError if snapshots are there and none can be read.
    """
    durable_steps: list[int] = world.run_on_main(durable.steps)
    if hot and world.local_rank == 0:
        for stale in stale_steps(hot, newest):
            log(
                f"the hot snapshot of step {stale} does not continue what is durable now (step {newest.step}): it was "
                f"overtaken, or somebody went back: removed"
            )
            hot.delete(stale)
    world.barrier()
    unreadable: set[int] = set()  # these stay where they are
    while True:
        own = [step for step in hot.steps() if step not in unreadable] if hot else []
        hot_steps = [set(steps) for steps in world.gather(own)]
        step = max([*durable_steps, *(s for steps in hot_steps for s in steps)], default=None)
        if step is None and unreadable:
            raise TransientError(f"{durable.shown}: no snapshot can be read: look at the disk, and try again")
        if step is None:
            return None
        # The hot tier first: it costs no traffic of the durable store.
        holders = [rank for rank, steps in enumerate(hot_steps) if step in steps]
        store = hot if holders else durable
        found = _CollectiveRead(store, step, holders or list(range(world.size)), world).read(take)
        if isinstance(found, Restored):
            return found
        if problem := next((finding.unreadable for finding in found if finding.unreadable), None):
            unreadable.add(step)
            durable_steps = [s for s in durable_steps if s != step]
            if world.is_main:
                log(f"UNREADABLE SNAPSHOT of step {step}: {problem}. It stays as it is; trying the next older one.")
            continue
        finders = [rank for rank, finding in enumerate(found) if finding.damage]
        if store is durable:
            durable_steps.remove(step)
            finders = finders[:1]  # all processes see the same store: one of them sets it aside
        if world.rank in finders and store is not None:
            _set_aside(store, step, str(found[world.rank].damage), log)
        world.barrier()


def _set_aside(store: Store, step: int, damage: str, log: Callable[[str], None]) -> None:
    with store.named_errors(), suppress(FileNotFoundError):  # another process of the node was faster
        name = store.set_aside(step)
        log(
            f"DAMAGED SNAPSHOT of step {step} in {store.url}: {damage}. Set aside (its manifest is now {name}); "
            f"trying the next older one."
        )


@dataclass
class _Finding:
    """What one process has found at a step. Travels to the others as JSON."""

    digest: str | None = None
    damage: str | None = None
    unreadable: str | None = None
    problems: tuple[str, ...] = ()  # of a UserError

    @classmethod
    def of(cls, act: Callable[[], str | None]) -> "_Finding":
        try:
            return cls(digest=act())
        except Damaged as error:
            return cls(damage=str(error))
        except Unreadable as error:
            return cls(unreadable=str(error))
        except UserError as error:
            return cls(problems=error.problems)

    def gathered(self, world: World) -> list["_Finding"]:
        """The findings of all processes, by rank. Raises UserError in all of them if one has met one."""
        findings = [_Finding(**other) for other in world.gather(asdict(self))]
        for finding in findings:
            if finding.problems:
                raise UserError(*finding.problems)
        return findings


class _CollectiveRead:
    """Reads one step. holders: the ranks that can see it in their store; they share the parts among them."""

    def __init__(self, store: Store | None, step: int, holders: Sequence[int], world: World) -> None:
        self.store, self.step, self.holders, self.world = store, step, holders, world
        self.own: Manifest | None = None
        self.part: Part | tuple[None, None] = None, None

    def read(self, take: Take) -> Restored | list[_Finding]:
        """The snapshot; if it is damaged or unreadable, what each process has found."""
        finding = _Finding.of(self._read_manifest if self.world.rank in self.holders else lambda: None)
        findings = finding.gathered(self.world)
        digest = next((f.digest for f in findings if f.digest), None)
        # Nodes with different numerics may hold different bits of one step. The lowest rank's digest is taken.
        readers = [rank for rank, f in enumerate(findings) if digest and f.digest == digest]
        if not readers:
            return findings
        text = encode_manifest(self.own).decode() if self.own and self.world.rank == readers[0] else None
        manifest = decode_manifest(self.world.gather(text)[readers[0]].encode())
        put, names = take(manifest), sorted(manifest.parts)
        mine = names[readers.index(self.world.rank) :: len(readers)] if self.world.rank in readers else []
        with closing(self._parts(manifest, mine, len(readers))) as parts:
            for first in range(0, len(names), len(readers)):
                together = names[first : first + len(readers)]
                findings = _Finding.of(lambda: self._advance(parts, together)).gathered(self.world)  # noqa: B023
                if any(f.damage or f.unreadable for f in findings):
                    return findings
                for name, reader in zip(together, readers, strict=False):
                    raw, tensors = self.part if reader == self.world.rank else (None, None)
                    received = self.world.broadcast_bytes(raw, reader, manifest.parts[name].size)
                    put(kind_of(name), decode_part(manifest, name, received) if tensors is None else tensors)
        return Restored(manifest, self.world.gather(self.store.url if self.store else None)[readers[0]])

    def _read_manifest(self) -> str:
        assert self.store is not None
        self.own = read_manifest(self.store, self.step)
        return self.own.digest

    def _parts(self, manifest: Manifest, names: list[str], readers: int) -> Generator[tuple[str, Part]]:
        if names:
            assert self.store is not None
            yield from read_parts(self.store, manifest, names, ahead=max(1, PARALLEL_PARTS // readers))

    def _advance(self, parts: Iterator[tuple[str, Part]], together: list[str]) -> None:
        """Read and verify this process's part of those that are broadcast next, if it has one."""
        for name, self.part in parts:
            assert name in together
            break
