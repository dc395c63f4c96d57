"""The README's commands work as they stand there, links lead somewhere, and CI calls what the Makefile has."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.kits.paths_kit import ROOT, ran

PAGES = [*ROOT.glob("*.md"), ROOT / "recipes/README.md", ROOT / "tests/README.md", ROOT / "mingpt/README.md"]
LINK = re.compile(r"(?:\]\(|src(?:set)?=\")(?!\w+:|#)([^)#\s\"]+)")
TEXT = "HAMLET: To be, or not to be, that is the question.\n" * 200
# Stands in for the program: short runs of a small model. The one that is killed stops (SIGSTOP) at its first snapshot.
PROGRAM = f"""#!/bin/sh
case $1 in
    train|launch) set -- "$@" train.max_steps=60 snapshot.every_steps=5 model=modern-nano world.device=cpu ;;
esac
case "$*" in
    train*run.name=killed*) exec {sys.executable} stopping.py "$@" ;;
esac
exec {sys.executable} -m mingpt "$@"
"""
STOPPING = """
import os, runpy, signal, threading, time
from pathlib import Path

def stop():
    while not [*Path("runs/killed/snapshots").glob("*/manifest.json")]:
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGSTOP)

threading.Thread(target=stop, daemon=True).start()
runpy.run_module("mingpt", run_name="__main__", alter_sys=True)
"""
SLEEP = """#!/bin/sh
while ! ls runs/killed/snapshots/*/manifest.json >/dev/null 2>&1; do /bin/sleep 0.1; done
/bin/sleep 0.5
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Those of docs/ are for `make docs`."""
    assert [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()] == []


def test_workflows_call_what_the_makefile_has() -> None:
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    runs = re.findall(r"run: (.*)", (ROOT / ".github/workflows/ci.yml").read_text())
    called = {run.removeprefix("make ") for run in runs if run.startswith("make ")}
    assert called == {"test", "docs", "dist"} <= {*targets}
    assert "sudo .ci/run" in runs


@pytest.mark.slow
def test_the_readmes_commands_work_and_a_killed_run_ends_with_the_same_digest(tmp_path: Path) -> None:
    for name, text in {"mingpt": PROGRAM, "sleep": SLEEP, "stopping.py": STOPPING}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for folder in (".venv/bin", "data"):
        (tmp_path / folder).mkdir(parents=True)
    for name in (".venv/bin/activate", "data/shakespeare.txt", "book.txt"):
        (tmp_path / name).write_text("" if name.endswith("activate") else TEXT)
    page = (ROOT / "README.md").read_text()
    blocks = re.findall(r"(?<!-->\n)^```bash\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 4
    made = "mingpt launch --nproc-per-node 2 experiment=shakespeare_char\n"  # what make train does (test_makefile.py)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = ran(["bash", "-ec", "".join([made, *blocks])], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    resumed = re.search(
        r"^resumed from step (\d+) .*\n(?:.*\n)*?attempt 2: steps \d+ to 60, 3 processes", done.stdout, re.M
    )
    assert resumed, done.stdout
    assert 0 < int(resumed[1]) < 60
    *_, killed, undisturbed = done.stdout.splitlines()
    assert re.fullmatch("[0-9a-f]{64}", killed)
    assert killed == undisturbed
