"""What shells complete of `mingpt …`: in the shells themselves."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cli_kit import Mingpt
from mingpt.cli import VERBS


@pytest.fixture
def run(tmp_path: Path) -> Mingpt:
    return Mingpt(tmp_path)


BASH = """
eval "$(mingpt completion bash)"
while IFS= read -r COMP_LINE; do
    COMP_POINT=${#COMP_LINE} COMP_TYPE=9 COMPREPLY=()
    _python_argcomplete mingpt
    (IFS='|'; printf '%s\\n' "${COMPREPLY[*]}")
done
"""


@pytest.mark.slow
def test_bash_gets_exactly_these_words(run: Mingpt) -> None:
    lines = {
        "mingpt ": "|".join(VERBS),
        "mingpt sn": "snapshots ",
        "mingpt snapshots re": "rewind ",
        "mingpt export --o": "--overwrite ",
        "mingpt fetch g": "gpt2-vocabulary ",
        "mingpt train model=gpt2-m": "gpt2-medium ",  # bash takes what follows the = for a word of its own
        "mingpt launch --nproc-per-node 2 seed=1 --rdzv-b": "--rdzv-backend ",
        "mingpt preflight --rdzv-backend ": "c10d|static",
        "mingpt nonsense ": "",
    }
    done = subprocess.run(
        ["bash", "-c", BASH], input="\n".join(lines) + "\n", env=run.env, capture_output=True, text=True, timeout=600
    )
    assert dict(zip(lines, done.stdout.splitlines(), strict=True)) == lines


SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(mingpt completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -Uz compinit; compinit -u -D; eval "$(mingpt completion zsh)"'),
    "fish": (["fish", "--no-config", "-i"], "mingpt completion fish | source"),
}


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_a_line_as_it_is_typed(shell: str, run: Mingpt) -> None:
    command, switch_on = SHELLS[shell]
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {shell} here")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(run.folder)
        os.execvpe(command[0], command, run.env | {"TERM": "dumb", "PS1": "", "HOME": str(run.folder)})
    try:
        until(terminal, f"{switch_on}\nprintf 'rea%s\\n' dy\n", "ready")
        # Ctrl-A goes to the line's beginning.
        told = until(terminal, "mingpt trai\tmodel=gpt2-m\tseed=8\x01echo to\\ld \n", "told .*8")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    assert told == "told mingpt train model=gpt2-medium seed=8"


def until(terminal: int, keys: str, wanted: str) -> str:
    """Type the keys, and wait for a line of output."""
    os.write(terminal, keys.encode())
    output, end = "", time.monotonic() + 120
    while time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            output += os.read(terminal, 4096).decode(errors="replace")
        if found := re.search(rf"^({wanted})\r?$", output, re.M):
            return found[1]
    raise AssertionError(f"no {wanted!r} in {output!r}")
