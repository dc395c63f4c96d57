"""recipes/serve.yaml: what it starts. (test_recipes.py: as SkyPilot reads it.)"""

import os
import runpy
import subprocess
from pathlib import Path

from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.kits.paths_kit import ROOT, ran
from tests.kits.recipe_kit import recipe


def started(tmp_path: Path, key: str) -> "subprocess.CompletedProcess[str]":
    """The run section with programs that print their arguments."""
    for name in (".venv/bin/mingpt", ".venv-vllm/bin/vllm"):
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text('#!/bin/sh\nprintf "<%s>" "$@"\necho\n')
        program.chmod(0o755)
    env = {"PATH": os.environ["PATH"], "RUN_DIR": "s3://b/run 1@50", "OPTIONS": "--dtype float32", "VLLM_API_KEY": key}
    command = ["bash", "-c", str(recipe("serve")["run"])]
    return ran(command, env=env, cwd=tmp_path)


def test_it_listens_where_replicas_are_reached_and_the_key_is_no_argument(tmp_path: Path) -> None:
    export, serve = started(tmp_path, "s3cret").stdout.splitlines()
    assert export == "<snapshots><export><s3://b/run 1@50><exported><--overwrite>"
    assert serve == (
        "<serve><exported><--served-model-name><mingpt><--host><0.0.0.0><--port><8000>"
        "<--middleware><only_v1.only_v1><--dtype><float32>"
    )
    done = started(tmp_path, "")  # without a key nothing is served
    assert (done.returncode, done.stdout) == (1, "")
    assert "VLLM_API_KEY" in done.stderr


def test_only_what_the_key_protects_can_be_reached() -> None:
    """As vLLM adds it, in front of a server that answers everything."""
    app = FastAPI()
    app.middleware("http")(runpy.run_path(str(ROOT / "recipes/only_v1.py"))["only_v1"])
    app.add_api_route("/{path:path}", lambda path: path)
    client = TestClient(app)
    answers = {
        path: client.get(path).status_code for path in ("/health", "/v1/models", "/invocations", "/v1", "//v1/x")
    }
    assert answers == {"/health": 200, "/v1/models": 200, "/invocations": 404, "/v1": 404, "//v1/x": 404}
