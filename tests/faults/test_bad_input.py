"""Bad input: one clear message that names the key or place and the cure, the right exit code, in bounded time, and no
process left behind. Each case runs for real, alone (mingpt.train) and with two workers (mingpt.launch)."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from bad_input_cases import CASES
from bad_input_kit import Case, Result, Scene, play, s3_server
from run_kit import Run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def good_snapshots(tmp_path_factory: pytest.TempPathFactory, text: Path, cache: Path) -> Path:
    """Of a good run: steps 2 and 4."""
    run = Run(str(tmp_path_factory.mktemp("good")), text, cache)
    run.finish(1, "train.max_steps=4", "snapshot.every_steps=2")
    return Path(run.dir) / "snapshots"


@pytest.fixture(scope="session")
def s3() -> Iterator[Callable[[str], str]]:
    """Starts an S3 server of a kind when it is first asked for, and gives its URL."""
    with ExitStack() as servers:
        yield lru_cache(lambda kind: servers.enter_context(s3_server(kind)))


def test_the_table_is_long_enough_and_each_case_has_a_name_of_its_own() -> None:
    assert len(CASES) >= 30
    assert len({case.name for case in CASES}) == len(CASES)


def played() -> Iterator[ParameterSet]:
    """Each case in each of its forms; of those with two, one is `nightly`, by turns."""
    for turn, case in enumerate(CASES):
        for i, form in enumerate(case.forms):
            others = len(case.forms) > 1 and (turn + i) % 2
            yield pytest.param(case, form, marks=[pytest.mark.nightly] * others, id=f"{case.name}-{form}")


@pytest.mark.parametrize(("case", "form"), list(played()))
def test_bad_input_has_its_message_and_its_exit_code(
    case: Case, form: str, tmp_path: Path, text: Path, good_snapshots: Path, s3: Callable[[str], str]
) -> None:
    (folder := tmp_path / form).mkdir()
    scene = Scene(folder, form, good_snapshots, s3)
    scene.text.write_bytes(text.read_bytes())
    check(case, form, play(case, scene))


def check(case: Case, form: str, result: Result) -> None:
    shown = f"mingpt.{form}, {result.seconds:.1f} s:\n{result.output}"
    assert result.code == case.code, shown
    assert "Traceback" not in result.output, shown
    assert "nobody-may-see" not in result.output, shown
    for words in (case.where, case.cure):
        assert re.search(words, result.last_words), f"{words!r} is not in the last words of {shown}"
    for words in case.also:
        assert re.search(words, result.output), f"{words!r} is not in {shown}"
    if form == "launch":
        assert result.workers == case.workers, shown
    if case.code == 64 and case.once:
        told = [line for line in result.output.splitlines() if re.search(case.where, line)]
        # What the command line set, the command, and the reason of the end.
        told = [line for line in told if not line.startswith(("config: ", "launch: "))]
        assert len(told) == 1, f"told {len(told)} times by {shown}"
