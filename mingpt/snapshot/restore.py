"""Where an attempt starts: the newest good step in either tier on any node, read once for the whole job.

Each part is read and verified by one process and handed on inside the job, so a world of any size takes each byte from
the durable store once, and a node that was replaced gets the hot tier's step from one that has it.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from torch import Tensor

from mingpt.errors import Damaged, TransientError, Unreadable, UserError
from mingpt.snapshot.format import Kind, Manifest, decode_manifest, decode_part, encode_manifest
from mingpt.snapshot.lineage import Newest, strangers
from mingpt.snapshot.reader import Loaded, kind_of, read_manifest, read_parts
from mingpt.snapshot.store import Store
from mingpt.storage import place
from mingpt.world.world import World


def restore(
    durable: Store, hot: Store | None, world: World, say: Callable[[str], None], newest: Newest
) -> Loaded | None:
    """The newest good snapshot, in every process. A damaged one is set aside, loudly, and the next older one tried.

    newest: of the durable ones. What a node has in memory and does not continue it is removed. Called by all processes.
    Raises UserError in all of them if a store says no.
    """
    durable_steps: list[int] = world.run_on_main(durable.steps)
    if hot and world.local_rank == 0:
        for old in strangers(hot, newest):
            say(
                f"the hot snapshot of step {old} does not continue what is durable now (step {newest.step}): it was "
                f"overtaken, or somebody went back: removed"
            )
            hot.delete(old)
    world.barrier()
    unreadable: set[int] = set()  # they stay, and are passed over
    while True:
        own = [step for step in hot.steps() if step not in unreadable] if hot else []
        hot_steps = [set(steps) for steps in world.gather(own)]
        step = max([*durable_steps, *(s for steps in hot_steps for s in steps)], default=None)
        if step is None and unreadable:
            raise TransientError(
                f"{durable.key}={durable.url}: no snapshot can be read: look at the disk, and try again"
            )
        if step is None:
            return None
        # The hot tier first: it costs no traffic of the durable store.
        holders = [rank for rank, steps in enumerate(hot_steps) if step in steps]
        store = hot if holders else durable
        found = _Together(store, step, holders or list(range(world.size)), world).read()
        if isinstance(found, Loaded):
            return found
        if problem := next((finding.unreadable for finding in found if finding.unreadable), None):
            unreadable.add(step)
            durable_steps = [s for s in durable_steps if s != step]
            if world.is_main:
                say(f"UNREADABLE SNAPSHOT of step {step}: {problem}. It stays as it is; trying the next older one.")
            continue
        finders = [rank for rank, finding in enumerate(found) if finding.damage]
        if store is durable:
            durable_steps.remove(step)
            finders = finders[:1]  # all look at one and the same
        if world.rank in finders and store is not None:
            _set_aside(store, step, str(found[world.rank].damage), say)
        world.barrier()


def _set_aside(store: Store, step: int, damage: str, say: Callable[[str], None]) -> None:
    with place(store.key, store.url), suppress(FileNotFoundError):  # several processes may have found it
        name = store.set_aside(step)
        say(
            f"DAMAGED SNAPSHOT of step {step} in {store.url}: {damage}. Set aside (its manifest is now {name}); "
            f"trying the next older one."
        )


@dataclass
class _Finding:
    """What one process has found at a step: for the others, as JSON."""

    digest: str | None = None
    damage: str | None = None
    unreadable: str | None = None
    problems: tuple[str, ...] = ()  # of a UserError

    @classmethod
    def of(cls, look: Callable[[], str | None]) -> "_Finding":
        try:
            return cls(digest=look())
        except Damaged as damage:
            return cls(damage=str(damage))
        except Unreadable as broken:
            return cls(unreadable=str(broken))
        except UserError as mistake:
            return cls(problems=mistake.problems)

    def gathered(self, world: World) -> list["_Finding"]:
        """Everybody's. Raises UserError in all processes if one of them has met one."""
        findings = [_Finding(**other) for other in world.gather(asdict(self))]
        for finding in findings:
            if finding.problems:
                raise UserError(*finding.problems)
        return findings


class _Together:
    """The reading of one step by the processes that can see it."""

    def __init__(self, store: Store | None, step: int, holders: Sequence[int], world: World) -> None:
        self.store, self.step, self.holders, self.world = store, step, holders, world
        self.own: Manifest | None = None
        self.parts: dict[str, tuple[memoryview, dict[str, Tensor]]] = {}

    def read(self) -> Loaded | list[_Finding]:
        """The snapshot; if it is damaged, what each process has found."""
        finding = _Finding.of(self._read_manifest if self.world.rank in self.holders else lambda: None)
        findings = finding.gathered(self.world)
        digest = next((f.digest for f in findings if f.digest), None)
        # Two nodes may hold the step with other bits, if their numerics differed: one of them has the word.
        readers = [rank for rank, f in enumerate(findings) if digest and f.digest == digest]
        if not readers:
            return findings
        text = encode_manifest(self.own).decode() if self.own and self.world.rank == readers[0] else None
        manifest = decode_manifest(self.world.gather(text)[readers[0]].encode())
        names = sorted(manifest.parts)
        reader_of = {name: readers[i * len(readers) // len(names)] for i, name in enumerate(names)}
        mine = [name for name in names if reader_of[name] == self.world.rank]
        findings = _Finding.of(lambda: self._read_parts(manifest, mine)).gathered(self.world)
        if any(f.damage or f.unreadable for f in findings):
            return findings
        state: dict[Kind, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
        for name in names:
            raw, tensors = self.parts.pop(name, (None, None))
            handed_on = self.world.broadcast_bytes(raw, reader_of[name], manifest.parts[name].size)
            state[kind_of(name)] |= decode_part(manifest, name, handed_on) if tensors is None else tensors
        return Loaded(manifest, state, self.world.gather(self.store.url if self.store else None)[readers[0]])

    def _read_manifest(self) -> str:
        assert self.store is not None
        self.own = read_manifest(self.store, self.step)
        return self.own.digest

    def _read_parts(self, manifest: Manifest, names: list[str]) -> None:
        if names:
            assert self.store is not None
            self.parts = read_parts(self.store, manifest, names)
