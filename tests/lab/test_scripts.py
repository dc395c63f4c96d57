"""Every shell script of the project, read by shellcheck (which the lab brings)."""

import pytest

from lab_kit import ROOT, needs_lab, run

pytestmark = [pytest.mark.lab, needs_lab]


def test_shellcheck_finds_nothing() -> None:
    folders = ("recipes", "tests/lab", ".ci")
    scripts = [f for folder in folders for f in sorted((ROOT / folder).rglob("*")) if f.suffix in (".sh", ".sbatch")]
    assert len(scripts) > 20
    # Names that come from a sourced file, or go to one, are found at run time only.
    run("shellcheck", "--severity=warning", "--exclude=SC1091,SC2034,SC2154", *map(str, scripts), str(ROOT / ".ci/run"))
