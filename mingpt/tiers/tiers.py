"""Finds a run's snapshots in both tiers, before its attempt may write: durable at snapshot.dir, hot in a node's memory.

Who writes there is the attempt's `Checkpointer`, which is made after the claim.
"""

from dataclasses import asdict, replace
from typing import Any

from mingpt.cli.console import Say
from mingpt.config.schema import Config
from mingpt.errors import Damaged, TransientError, Unreadable, UserError
from mingpt.snapshot import attempts
from mingpt.snapshot.elsewhere import Marker, read_marker, remove_marker
from mingpt.snapshot.lineage import NewestDurable, set_overtaken_aside, stale_steps
from mingpt.snapshot.reader import verify
from mingpt.snapshot.restore import Restored, Take, restore
from mingpt.snapshot.store import Store
from mingpt.tiers import hot
from mingpt.tiers.home import Home
from mingpt.world.world import World


def newest(config: Config) -> int:
    """The newest step that this node can go on from, in either tier; 0 if there is none."""
    if marker := read_marker(config.run.dir):  # the run is on another node's disk
        memory = hot.find_hot(config.snapshot.hot_dir, config.run.dir, marker.run)
        return max([marker.step, *(memory.steps() if memory else ())])
    durable = Store(config.snapshot.dir)
    memory = hot.find_hot(config.snapshot.hot_dir, config.run.dir) if config.snapshot.hot_every_steps else None
    steps = durable.steps()
    if memory is not None:
        stale = stale_steps(memory, NewestDurable.of(durable, attempts.records(config.run.dir)))
        steps += [step for step in memory.steps() if step not in stale]
    return max(steps, default=0)


class Tiers:
    """Where the snapshots of a run lie, and what an attempt finds there."""

    # The durable ones.
    store: Store
    # Those in this node's memory; None: this node keeps none.
    hot_store: Store | None
    # The newest durable snapshot. Hot ones that do not continue it are of a past that was set aside or overtaken.
    base: NewestDurable
    # Which processes see run.dir and snapshot.dir as rank 0 does.
    home: Home

    def __init__(self, config: Config, world: World, state_bytes: int, log: Say, home: Home | None = None) -> None:
        """Called by all processes. state_bytes: of all state. home: None if all processes see all folders.

        Raises UserError if snapshot.dir can't be used. A hot tier that can't be used is logged and left out.
        """
        self.world = world
        self.log = log
        self.home = home or Home(range(world.size), range(world.size))
        self.run_dir = config.run.dir
        # What this node keeps of a run whose folder it does not see; None: nothing.
        self._marker: Marker | None = None
        self.store = Store(config.snapshot.dir)
        self.hot_store = self._open_hot(config, state_bytes)
        self.base = NewestDurable(**world.run_on_main(self._set_aside_and_find_base))

    def _open_hot(self, config: Config, state_bytes: int) -> Store | None:
        if not config.snapshot.hot_every_steps:
            return None
        identity = self.world.run_on_main(lambda: hot.run_id(config.run.dir))
        # NCCL of several processes takes shared memory for its own channels, out of the same /dev/shm.
        shared_with_nccl = self.world.backend == "nccl" and self.world.size > 1
        spare = hot.NCCL_BYTES if shared_with_nccl else hot.SPARE_BYTES
        try:
            return hot.open_hot(config.snapshot.hot_dir, config.run.dir, identity, state_bytes, spare)
        except UserError as error:
            if self.world.local_rank == 0:
                self.log(f"no hot snapshots on this node: {error}")
            return None

    def _set_aside_and_find_base(self) -> dict[str, Any]:
        """In rank 0: a snapshot of an attempt that was overtaken must not be taken up, however new it is."""
        records = attempts.records(self.run_dir)
        set_overtaken_aside(self.store, records, self.log)
        return asdict(NewestDurable.of(self.store, records))

    def restore(self, take: Take) -> Restored | None:
        """Take over the newest good snapshot of either tier, as `restore`. Called by all processes."""
        return restore(self.store, self.hot_store, self.world, self.log, self.base, take, self.home.snapshots)

    def is_durable(self, loaded: Restored) -> bool:
        """Whether what was restored is durable, and not only in a node's memory. Called by all processes."""

        def stored() -> bool:
            if loaded.url == self.store.url:
                return True
            if (self.base.step, self.base.digest) != (loaded.manifest.step, loaded.manifest.digest):
                return False
            try:
                verify(self.store, loaded.manifest.step)  # if it is damaged, the only good copy is in memory
            except (Damaged, Unreadable):
                return False
            return True

        return bool(self.world.run_on_main(stored))

    def forget_hot(self) -> None:
        """Remove the hot snapshots of an attempt that was killed after the run's last step was durable."""
        if self.hot_store and self.world.local_rank == 0:
            hot.remove(self.hot_store)

    def note_home(self, attempt: int) -> None:
        """Have each node know where the run is: those that have it, by no marker. Called by all processes."""
        identity = self.world.run_on_main(lambda: hot.run_id(self.run_dir)) if self.home.host else ""
        if self.world.is_main:  # the others who see run.dir see the same file
            remove_marker(self.run_dir)
        if self.world.rank not in self.home.run and self.world.local_rank == 0:
            self._marker = Marker(identity, self.home.host, attempt, self.base.step)
        self.note_step(self.base.step)

    def note_step(self, step: int) -> None:
        """Where run.dir is not seen, note it in the marker; that node's launcher, too, learns that the run goes on."""
        if self._marker is None:
            return
        self._marker = replace(self._marker, step=step)
        try:
            self._marker.write(self.run_dir)
        except (UserError, TransientError) as error:
            self._marker = None  # said once
            self.log(f"on which node's disk this run lives could not be noted on this node: {error}")
