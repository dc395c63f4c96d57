"""recipes/serve.yaml, as SkyPilot reads it; and a `workdir` from git, as docs/skypilot.md has it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paths_kit import ROOT
from recipe_kit import recipe

SKY = ROOT / ".venv-sky/bin/python"
ASK = """
import json, sys, yaml
import sky
task = sky.Task.from_yaml_config(yaml.safe_load(sys.stdin), env_overrides=[("RUN_DIR", "s3://b/run 1")],
                                 secrets_overrides=[("MINGPT_SERVE_KEY", "k")])
(resources,) = task.resources
service = task.service
print(json.dumps({"ports": resources.ports, "workdir": task.workdir, "setup": task.setup, "service": service and {
    "probe": service.readiness_path, "delay": service.initial_delay_seconds, "replicas": service.min_replicas}}))
"""


def ask_sky(task: dict[str, Any], home: Path) -> "subprocess.CompletedProcess[str]":
    if not SKY.exists():
        pytest.skip("needs SkyPilot in .venv-sky: make .venv-sky/.installed")
    env = {**os.environ, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = [str(SKY), "-c", ASK]
    return subprocess.run(
        command, input=json.dumps(task), env=env, cwd=ROOT, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_skypilot_reads_the_service_and_a_workdir_of_git(tmp_path: Path) -> None:
    git = {"url": "https://github.com/you/mingpt", "ref": "v1"}
    done = ask_sky({**recipe("serve"), "workdir": git}, tmp_path)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout.splitlines()[-1])
    assert read["service"] == {"probe": "/health", "delay": 1200, "replicas": 1}
    assert read["ports"] == ["8000"]
    assert read["workdir"] == git
    assert read["setup"] == "EXTRAS=serve bash recipes/setup.sh"


def test_it_listens_where_replicas_are_reached_and_the_key_is_no_argument(tmp_path: Path) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    python.chmod(0o755)
    env = {"PATH": os.environ["PATH"], "RUN_DIR": "s3://b/run 1", "OPTIONS": "--queue 4", "MINGPT_SERVE_KEY": "s3cret"}
    command = ["bash", "-c", str(recipe("serve")["run"])]
    said = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said == "<-m><mingpt.serve><s3://b/run 1><--host><0.0.0.0><--port><8000><--queue><4>"
