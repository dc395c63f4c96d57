"""Compute past steps of a run again, with the same bits, from its nearest snapshot. The run is only read.

    with replay("runs/a", 1200) as past:     # its state is that after step 1199
        figures = past.advance()             # step 1200, as the run did it
        print(figures.same)                  # whether loss and norm have the bits that the run recorded

It takes one process: a step's bits do not depend on the number of processes (with reduce=exact).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from mingpt.compose.stored import problems_of_places, replay_config
from mingpt.compute.guard import merged
from mingpt.compute.numerics import changes, fingerprint, pin
from mingpt.config.affecting import section_of
from mingpt.config.schema import Config
from mingpt.data.opening import open_data
from mingpt.data.source import Source
from mingpt.errors import Damaged, Unreadable, UserError
from mingpt.history.history import Bits, History, Stretch
from mingpt.model.language import LanguageModel
from mingpt.replay.bench import Bench, Saved
from mingpt.snapshot.reader import read
from mingpt.train.figures import Figures
from mingpt.weights.reading import start_from
from mingpt.world.env import Env
from mingpt.world.joining import join
from mingpt.world.world import World


@dataclass(frozen=True)
class Change:
    """How a replayed step differs from the run's."""

    # Overrides of the attempt's config.
    settings: tuple[str, ...] = ()
    # Positions in the batch of one step, whose targets do not count.
    drop: frozenset[int] = frozenset()


AS_IT_WAS = Change()


@dataclass(frozen=True)
class Again:
    """A step that was computed again."""

    step: int
    # The one that computed the step, of those whose steps count.
    attempt: int
    figures: Figures
    lr: float
    # The run's own bits; None: it recorded none.
    recorded: Bits | None

    @property
    def same(self) -> bool | None:
        """Whether the bits of loss and gradient norm are those recorded; None: nothing to compare with."""
        if self.recorded is None:
            return None
        ours, theirs = (self.figures.loss, self.figures.grad_norm), (self.recorded.loss, self.recorded.grad_norm)
        return repr(ours) == repr(theirs)  # equal also where both are NaN

    def bits(self) -> str:
        """The bits that came out, and those recorded, as a text."""
        ours, theirs = self.figures, self.recorded
        assert theirs
        return f"loss {ours.loss!r} and norm {ours.grad_norm!r}, recorded {theirs.loss!r} and {theirs.grad_norm!r}"


class Replay:
    """`bench` has the state after `step` steps. base: the step of the snapshot that it began from, 0: config and seed.

    notes: what keeps bits from being those of the run, one line each. numerics: this machine's fingerprint.
    """

    def __init__(self, past: History, step: int, world: World, here: Sequence[str]) -> None:
        self.past, self.world, self.here = past, world, tuple(here)
        self.notes = [*past.trace_damage.values()]
        # By the data's section, and by attempt and settings: opening data, and Hydra, take longer than a small step.
        self._sources: dict[str, Source] = {}
        self._configs: dict[tuple[int, tuple[str, ...]], Config] = {}
        # What `bench` is made for; None before the first step.
        self._at: tuple[Stretch, tuple[str, ...]] | None = None
        saved = self._snapshot(step - 1) or self._initial()
        self.base = self.step = saved.step
        # A state that the next bench takes over; None: the state is the bench's.
        self.saved: Saved | None = saved
        self.bench: Bench
        self.numerics: dict[str, Any] = {}

    def advance(self, change: Change = AS_IT_WAS) -> Again:
        """Compute the next step."""
        self.prepare(change.settings)
        figures = self.bench.step(self.step, change.drop)
        self.step += 1
        bits, lr = self.past.bits(self.step), self.bench.context.update.lr(self.step - 1)
        return Again(self.step, self.stretch.attempt, figures, lr, bits)

    @property
    def stretch(self) -> Stretch:
        """The stretch of the last step, or of the next one after `prepare`."""
        assert self._at
        return self._at[0]

    def check(self, settings: tuple[str, ...]) -> None:
        """Raise UserError if the next step can't be computed with these settings."""
        replay_config(self.past.stretch(self.step + 1).config, self.past.folder, self.here, settings)

    def save(self) -> Saved:
        return self.saved or self.bench.save(self.step)

    def go_back(self, saved: Saved) -> None:
        self.saved, self.step = saved, saved.step

    def prepare(self, settings: tuple[str, ...] = ()) -> None:
        """Make the bench that computes the next step. A new attempt, or other settings, start as a resume does."""
        stretch = self.past.stretch(self.step + 1)
        if self.saved is None and self._at == (stretch, settings):
            return
        saved = self.save()
        if stretch.first == self.step + 1:
            # A resume there began with no skipped step (the number is not stored), and with what rollbacks had dropped.
            saved = replace(saved, skips=0, dropped=merged([*saved.dropped, *stretch.dropped]))
        if (stretch.attempt, settings) not in self._configs:
            config = replay_config(stretch.config, self.past.folder, self.here, settings)
            self._configs[stretch.attempt, settings] = config
        config = self._configs[stretch.attempt, settings]
        source = self._source(config, stretch)
        self.bench = Bench(config, source, self.world, stretch.world_size)
        self.bench.load(saved)
        # With other settings the bits differ anyway.
        if not settings:
            self._compare_numerics(config, source, stretch)
        self.saved, self._at = None, (stretch, settings)

    def _snapshot(self, step: int) -> Saved | None:
        """The newest good one up to `step`."""
        for base in self.past.bases(step):
            try:
                loaded = read(self.past.store, base)
            except (Damaged, Unreadable) as error:
                self.notes.append(f"the snapshot of step {base} can't be used ({error}); an older one is taken")
                continue
            return Saved(base, loaded.state)
        return None

    def _initial(self) -> Saved:
        """The state before the first step: from config and seed, or the weights that model.init_from names."""
        stretch = self.past.stretches[0]
        if stretch.first != 1:
            raise UserError(
                f"{self.past.folder}: no good snapshot is left to begin from, and its attempts do not lead back to "
                f"step 1"
            )
        config = replay_config(stretch.config, self.past.folder, self.here)
        source = self._source(config, stretch)
        bench = Bench(config, source, self.world, stretch.world_size)
        url, model = section_of(stretch.config, "model").get("init_from"), bench.context.model
        if isinstance(url, str) and isinstance(model, LanguageModel):
            if problems := problems_of_places(url, self.past.folder):
                raise UserError(*(f"model.init_from {p}: replay a step after the first snapshot" for p in problems))
            found = start_from(model, url, source.vocabulary, self.world)
            if stretch.numerics.get("init_from", found) != found:
                raise UserError(f"model.init_from={url}: its weights are not those that the run started from")
        return bench.save(0)

    def _source(self, config: Config, stretch: Stretch) -> Source:
        """The data. Raises UserError unless its content is that of the attempt."""
        key = config.data.model_dump_json()
        if key not in self._sources:
            self._sources[key] = open_data(config.data, config.model.block_size, config.batch.micro_size)
        source, wanted = self._sources[key], stretch.numerics.get("data")
        if wanted not in (None, source.sha256):
            raise UserError(
                f"{', '.join(config.data.places()) or 'data'}: the content ({source.sha256[:16]}) is not that of "
                f"attempt {stretch.attempt} ({str(wanted)[:16]}): give the place of the run's own, data.path=…"
            )
        return source

    def _compare_numerics(self, config: Config, source: Source, stretch: Stretch) -> None:
        if config.reduce == "fast":
            self._note(f"attempt {stretch.attempt} added with reduce=fast: the bits depend on its processes")
        ours = fingerprint(config, self.world.device, source.sha256)
        self.numerics = ours | {"init_from": stretch.numerics.get("init_from")}
        theirs: dict[str, Any] = {k: v for k, v in stretch.numerics.items() if k not in ("init_from", "data")}
        if found := changes(theirs, ours)[0] if theirs else []:
            self._note(f"this machine is not as that of attempt {stretch.attempt}: {', '.join(found)}")
        if not theirs:
            self._note(f"on what machine attempt {stretch.attempt} computed is not known")

    def _note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)


@contextmanager
def replay(run: str | History, step: int, here: Sequence[str] = ()) -> Iterator[Replay]:
    """The run at a point from which `step` can be computed: `advance` until it has that number.

    run: its history, or where it lies. here: overrides that say where data lies on this machine, or on which device to
    compute. Raises UserError if the step can't be had.
    """
    if Env.read(check=True).size > 1:
        raise UserError("a replay takes one process, and bits do not depend on their number: start it without launch")
    past = History.open(run) if isinstance(run, str) else run
    past.check_step(step)
    first = replay_config(past.stretch(step).config, past.folder, here)
    with join(first.world) as world:
        pin(first, world.device)
        yield Replay(past, step, world, here)
