"""`make train` with a stub in place of Python: which run its sample is of."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.kits.paths_kit import ROOT, ran

# Notes what it is asked, and lets the real one tell the config. There is no report.
PYTHON = f"""#!/bin/sh
echo "$*" >>log
case "$*" in *"mingpt report"*) exit 64 ;; esac
case "$*" in *--cfg*) cd {ROOT} && exec {sys.executable} "$@" ;; esac
"""


def test_make_train_prints_a_sample_and_writes_a_report_of_the_run_that_it_trained(tmp_path: Path) -> None:
    (python := tmp_path / ".venv/bin/python").parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    command = ["make", "-f", str(ROOT / "Makefile"), "-o", ".venv/.trainer", "train", "ARGS=run.dir=s3://b/r"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = ran(command, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    *log, sample, report = (tmp_path / "log").read_text().splitlines()
    assert report == "-m mingpt report s3://b/r"
    assert sample == "-m mingpt generate s3://b/r/snapshots --prompt To be, or not to be --tokens 300 --seed 1"
    assert "-m mingpt.launch --nproc-per-node 2 experiment=shakespeare_char run.dir=s3://b/r" in log


def test_each_module_that_something_starts_by_name_can_be_started() -> None:
    started = dict[str, str]()
    for file in (p for folder in (".ci", "recipes", "docs", "benchmarks", "tests") for p in (ROOT / folder).rglob("*")):
        if file.suffix in (".py", ".md", ".sh", ".sbatch", ".yaml", "") and file.is_file():
            started |= dict.fromkeys(
                re.findall(r"-m[ ,'\"]+(mingpt[\w.]*\w)", file.read_text(errors="replace")), file.name
            )
    started |= dict.fromkeys(re.findall(r"-m (mingpt[\w.]*)", (ROOT / "Makefile").read_text()), "Makefile")
    assert {"mingpt", "mingpt.train", "mingpt.launch"} <= started.keys()
    for module, name in started.items():
        spec = find_spec(module)
        assert spec is not None, f"{module}: {name}"
        assert not spec.submodule_search_locations or find_spec(f"{module}.__main__"), f"{module}: {name}"
