"""A past step, computed again: the bits are those that the run recorded, whatever its data and its processes were."""

from pathlib import Path
from uuid import uuid4

import pytest

from mingpt.errors import CRASHED, FINISHED, UserError
from mingpt.history.history import Bits, History
from mingpt.replay.closeup import layers, look
from mingpt.replay.replaying import Again, Change, replay
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from tests.kits.poison_kit import POISONED, poison
from tests.kits.replay_kit import RANDOM, data_of, files_of, train_here


def again(url: str, first: int, last: int, *here: str) -> tuple[int, list[Again]]:
    """The snapshot that was taken, and the steps up to `last` that were computed from there."""
    with replay(url, first, here) as run:
        while run.step < first - 1:
            assert run.advance().same
        return run.base, [run.advance() for _ in range(first, last + 1)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, tuple[str, ...]]:
    """A run of three attempts, of which the third has another learning rate; and where its data is."""
    folder = tmp_path_factory.mktemp("small")
    how, where = data_of("text", folder / "data")
    run_dir, how = f"{folder}/run", (*how, *where, f"data.cache_dir={folder}/cache")
    train_here(run_dir, *how, "train.max_steps=5")
    train_here(run_dir, *how, "train.max_steps=7")
    train_here(run_dir, *how, "train.max_steps=10", "optimizer.lr=0.02", "resume.changed=true")
    return run_dir, where


def test_bits_are_those_recorded(tmp_path: Path) -> None:
    """exactness/test_worlds.py: of several processes. frozen/test_frozen.py: of other kinds."""
    how, where = data_of("documents apart", tmp_path / "data")
    train_here(f"{tmp_path}/run", *how, *where, f"data.cache_dir={tmp_path}/cache", "train.max_steps=6")
    base, steps = again(f"{tmp_path}/run", 6, 6, *where)
    assert (base, [step.same for step in steps]) == (4, [True])
    with replay(f"{tmp_path}/run", 2, where) as run:
        assert run.base == 0
        assert [run.advance().same for _ in range(6)] == [True] * 6
        assert run.notes == []


@pytest.mark.parametrize("setting", ["precision=fp16", "reduce=fast", "health.spike_sigma=3"])
def test_numbers_and_optimizers_in_a_bucket(setting: str) -> None:
    train_here(url := f"memory://{uuid4().hex}", *RANDOM, setting, "train.max_steps=6")
    assert [step.same for step in again(url, 5, 6)[1]] == [True] * 2


def test_steps_of_several_attempts_and_the_run_stays_as_it_is(small: tuple[str, tuple[str, ...]]) -> None:
    url, where = small
    before, folders = files_of(Path(url)), [Path(url), *(p for p in Path(url).rglob("*") if p.is_dir())]
    for mode in (0o555, 0o755):
        for path in folders:
            path.chmod(mode)
        assert [(step.attempt, step.same) for step in again(url, 6, 9, *where)[1]] == [(2, True)] * 2 + [(3, True)] * 2
    assert files_of(Path(url)) == before


def test_a_run_that_went_back(tmp_path: Path) -> None:
    """Its second attempt shows other batches; what the first one did is replayed as that attempt's."""
    how = (*POISONED, "health.spike_sigma=8", "health.max_skips=2", "health.max_rollbacks=1", *poison([17, 18]))
    url = f"run.dir={tmp_path}/run"
    assert attempt([*how, url], Lifetime()) == CRASHED
    assert attempt([*how, url], Lifetime()) == FINISHED
    own = ("model._target_=tests.kits.poison_kit.Line", "data._target_=tests.kits.poison_kit.rows")
    with replay(f"{tmp_path}/run", 16, own) as run:
        steps = [run.advance() for _ in range(8)]
        assert [(step.attempt, step.same, step.figures.skips) for step in steps] == [(3, True, 0)] * 8
    with replay(History.open(f"{tmp_path}/run", attempt=1), 17, own) as run:
        steps = [run.advance() for _ in range(4)]
        assert [(step.same, step.figures.skips) for step in steps] == [(True, 0), (True, 0), (True, 1), (True, 2)]


def test_what_cannot_be_had(small: tuple[str, tuple[str, ...]], tmp_path: Path) -> None:
    url, where = small
    (tmp_path / "other.txt").write_text(Path(where[0].partition("=")[2]).read_text()[::-1])
    for here, told in (
        ((), r"data\.path"),
        ([f"data.path={tmp_path}/other.txt"], r"^data\.path: .* attempt 3"),
        ([*where, "data.val_fraction=0.2"], r"^data\.val_fraction=0\.2"),
        ([*where, "optimizer.lr=1"], r"^optimizer\.lr"),
    ):
        with pytest.raises(UserError, match=told):
            again(url, 9, 9, *here)


def test_a_step_under_the_lens(tmp_path: Path) -> None:
    train_here(f"{tmp_path}/run", *RANDOM, "train.max_steps=5")
    with replay(f"{tmp_path}/run", 5) as run:
        run.prepare()
        _, largest = look(run.bench, 4)
        before = {name: p.detach().clone() for name, p in run.bench.context.model.named_parameters()}
        figures = run.advance().figures
        found = layers(run.bench, before, figures, largest)
    assert sum(x.gradient**2 for x in found) ** 0.5 == pytest.approx(figures.grad_norm, rel=1e-5)
    assert all(x.update > 0 and x.activation > 0 for x in found)


def test_another_setting_from_there_on(tmp_path: Path) -> None:
    """The bits are those of a run that was resumed with it."""
    train_here(f"{tmp_path}/run", *RANDOM, "train.max_steps=8")
    train_here(f"{tmp_path}/short", *RANDOM, "train.max_steps=5")
    train_here(f"{tmp_path}/short", *RANDOM, "train.max_steps=8", "optimizer.lr=0.03", "resume.changed=true")
    with replay(f"{tmp_path}/run", 6) as run:
        run.advance()
        changed = [run.advance(Change(("optimizer.lr=0.03",))) for _ in range(3)]
    assert [step.same for step in changed] == [True, False, False]  # a step's loss and norm come before its update
    other = History.open(f"{tmp_path}/short")
    for step in changed:
        assert other.bits(step.step) == Bits(2, step.figures.loss, step.figures.grad_norm)
