"""Does this node compute right? `mingpt selftest`, before the nodes meet."""

import json
import socket
import subprocess
import sys

from mingpt.preflight.finding import Finding

SECONDS = 10
LIMIT = 300  # with torch's import and the first steps on a busy machine
ADVICE = "leave this node out (mingpt selftest shows more)"


def findings() -> list[Finding]:
    """A problem for each check that failed; none on a good node."""
    command = [sys.executable, "-m", "mingpt.selftest", "--seconds", str(SECONDS), "--json"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        results = json.loads(ended.stdout)["results"]
        failed = [f"{result['what']}: {result['found']}" for result in results if result["ok"] is False]
    except subprocess.TimeoutExpired:
        failed = [f"known steps did not end within {LIMIT} s"]
    except ValueError:  # no JSON: it ended with an error
        failed = [(ended.stderr.strip().splitlines() or [f"selftest ended with exit code {ended.returncode}"])[-1]]
    return [Finding("problem", socket.gethostname(), "computing", text, ADVICE) for text in failed]
