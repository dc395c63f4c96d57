"""Bad input: one clear message that names the key or place and the cure, the right exit code, in bounded time, and no
process left behind. Each case runs for real, alone (mingpt.train) and with two workers (mingpt.launch)."""

import re
from pathlib import Path

import pytest

from bad_input_cases import CASES
from bad_input_kit import Case, Scene, play
from run_kit import Run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def good_snapshots(tmp_path_factory: pytest.TempPathFactory, text: Path, cache: Path) -> Path:
    """Of a good run: steps 2 and 4."""
    run = Run(str(tmp_path_factory.mktemp("good")), text, cache)
    run.finish(1, "train.max_steps=4", "snapshot.every_steps=2")
    return Path(run.dir) / "snapshots"


@pytest.mark.parametrize(
    ("case", "form"), [pytest.param(c, form, id=f"{c.name} ({form})") for c in CASES for form in c.forms]
)
def test_bad_input_has_its_message_and_its_exit_code(
    case: Case, form: str, tmp_path: Path, text: Path, good_snapshots: Path
) -> None:
    scene = Scene(tmp_path, form, good_snapshots)
    scene.text.write_bytes(text.read_bytes())
    result = play(case, scene)
    shown = f"{result.output}\n({result.seconds:.1f} s)"
    assert result.code == case.code, shown
    assert "Traceback" not in result.output, shown
    assert "nobody-may-see" not in result.output, shown
    for words in (case.where, case.cure):
        assert re.search(words, result.last_words), shown
    for words in case.also:
        assert re.search(words, result.output), shown
    if form == "launch":
        assert result.workers == case.workers, shown
    if case.code == 64:
        told = re.findall(rf"^error: .*(?:{case.where})", result.output, re.M)
        assert len(told) == 1, f"told {len(told)} times:\n{shown}"
