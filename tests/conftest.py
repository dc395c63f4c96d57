"""What several test files share."""

import gc
import logging
import os
import random
import re
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from tests.kits.run_kit import Run
from tests.kits.store_kit import Stores, forget_clients
from tests.kits.told import Told

# While the tests are imported, nothing is garbage: 14 CPU seconds in place of 24, in each of the processes that test.
gc.disable()


# Where CI is set, a skipped test has failed, but for these, by how their ids begin.
SKIPPED = {
    "tests/frozen/test_frozen.py": "which bits come out is recorded for some kinds of machines only",
    "tests/report/test_report_browser.py": "a nightly test's browser, which .ci/run does not install",
    "tests/selftest/test_selftest.py": "what a machine without a GPU says",
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return failed_if_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return failed_if_skipped((yield))


Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def failed_if_skipped(report: Report) -> Report:
    expected = hasattr(report, "wasxfail") or report.nodeid.startswith(tuple(SKIPPED))
    if "CI" in os.environ and report.skipped and not expected:
        report.outcome = "failed"
        report.longrepr = f"skipped, which no test is in CI (see SKIPPED in tests/conftest.py): {report.longrepr}"
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-messages", action="store_true", help="write tests/messages.txt, to be reviewed as text")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# The machine may be shared, and a slow example is no bug.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start, too: other counts give other bits
os.environ["MINGPT_RDZV_SECRET"] = "for the tests alone, and for all of them"  # c10d rendezvous of several nodes

# `nohup` and a script's `&` let signals be ignored, and every child inherits that. What is caught here comes to the
# children as usual, and still does not end the tests.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Told:
    """Compares a message with tests/messages.txt: see kits/told.py."""
    return Told(request.node.nodeid, request.config.getoption("--write-messages"))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 6,000 characters with something to learn in it: lines of words from a small vocabulary."""
    chooser = random.Random(1)
    words = re.findall(r"\w+", "the king is dead long live queen and all her men O woe thou art")
    lines = (" ".join(chooser.choices(words, k=6)) + ",.;!?"[chooser.randrange(5)] for _ in range(1000))
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines)[:6000])
    return path


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, text: Path, cache: Path) -> Path:
    """The directory of a run of twelve steps, with snapshots at 4, 8 and 12. To be copied, not changed."""
    from mingpt.tiers.hot import run_id
    from tests.kits.branch_kit import (
        train,  # torch, which few tests need in this process  # torch, which few tests need in this process
    )

    folder = tmp_path_factory.mktemp("trained") / "run"
    train(folder, text, cache)
    run_id(str(folder))  # as a run with hot snapshots has one
    return folder


@pytest.fixture
def outlived(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After a failure a process has some seconds to live. This one has more tests to run, with its own threads."""
    import torch  # which few tests need in this process

    monkeypatch.setattr("mingpt.world.joining._exit_after", lambda seconds, code: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Hydra sets up logging, to an output that is closed after the test."""
    loggers = [logging.getLogger(), logging.getLogger("hydra")]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture
def train(tmp_path: Path, outlived: None) -> Callable[..., int]:
    """Trains a run with bad steps in tmp_path/run, in this process, with these overrides; returns the exit code."""
    from mingpt.train.attempt import attempt
    from mingpt.world.lifetime import Lifetime
    from tests.kits.poison_kit import POISONED

    return lambda *overrides: attempt([*POISONED, f"run.dir={tmp_path}/run", *overrides], Lifetime())


@pytest.fixture
def new_run(tmp_path: Path, text: Path, cache: Path) -> Callable[..., Run]:
    """Makes runs that train on `text`, each in a folder of its own."""

    def make(*overrides: str, name: str = "run") -> Run:
        return Run(str(tmp_path / name), text, cache, overrides)

    return make


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Stores]:
    """Starts object stores by their kind, and ends them; this process's clients then forget them."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        stores = Stores(tmp_path / "stores", monkeypatch)
        try:
            yield stores
        finally:
            stores.close()
    forget_clients()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, text: Path, cache: Path) -> Callable[..., Run]:
    """The finished run of one process that was never interrupted, for given overrides; computed once a session."""
    finished: dict[tuple[str, ...], Run] = {}

    def get(*overrides: str) -> Run:
        if overrides not in finished:
            run = Run(str(tmp_path_factory.mktemp("undisturbed")), text, cache, overrides)
            run.finish(1)
            finished[overrides] = run
        return finished[overrides]

    return get
