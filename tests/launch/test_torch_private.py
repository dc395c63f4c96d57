"""What mingpt takes of torch beyond its documented interface is there. (What ours overrides, mypy compares.)

`make test-torch TORCH=VERSION` runs them with another torch. What is gone in a newer one is followed. (A name that ours
imports and that is gone ends every test.)
"""

import inspect
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

from mingpt import TORCH
from mingpt.world.standby import ASK_NO_CUDA
from tests.kits.paths_kit import ROOT

ELASTIC = "torch.distributed.elastic"
AGENT = f"{ELASTIC}.agent.server.local_elastic_agent.LocalElasticAgent"
STATIC = f"{ELASTIC}.rendezvous.static_tcp_rendezvous.StaticTCPRendezvous"

# What stands in torch's code and ours counts on.
LINES = {
    AGENT: (r"self\._pcontext\b.*=", r"self\._remaining_restarts\b.*=", r"self\._worker_group\b.*="),
    STATIC: (r"self\._store\b.*=", r"self\.master_port\b.*="),
    # Variables of the environment.
    f"{ELASTIC}.multiprocessing.api": ("TORCHELASTIC_ERROR_FILE",),
    # A worker of the standby's takes a Popen's place.
    f"{ELASTIC}.multiprocessing.api.SubprocessContext": (r": get_subprocess_handler\(", r"\.proc\.wait\("),
    f"{ELASTIC}.multiprocessing.subprocess_handler.SubprocessHandler": (
        r"self\.proc\b.* = self\._popen\(args_str, env_vars\)",
        r"self\._stdout = ",
        r"self\._stderr = ",
        r"start_new_session.*True",
        r"os\.killpg\(self\.proc\.pid, death_sig\)",
    ),
    f"{ELASTIC}.agent.server.local_elastic_agent": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    f"{ELASTIC}.rendezvous.dynamic_rendezvous": ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE",),
    "torch.distributed.argparse_util": ("PET_",),
    # The standby imports torch's compiler, which may not begin to use CUDA: see ASK_NO_CUDA.
    "torch.cuda._nvml_based_avail": ASK_NO_CUDA,
    "torch.cuda.is_available": (r"if _nvml_based_avail\(\):\n(?: *#.*\n)* *return device_count\(\) > 0",),
    # Our agent decides who is started again, learns how its workers ended, and has its own limit.
    f"{AGENT}._invoke_run": ("self._remaining_restarts > 0", r"self._monitor_workers\("),
    f"{AGENT}.run": (r"self._shutdown\(e.sigval",),
    # Without it torch opens a store of its own, at every address.
    f"{STATIC}.next_rendezvous": ("if not self._store",),
    "torch.optim.adamw.adamw": ("found_inf",),  # else steps that are not finite are not skipped
}


def source(path: str) -> str:
    """The code of a module, a function, or a class and those of torch that it is made of."""
    found = resolve_name(path)
    of = [c for c in found.__mro__ if c.__module__.startswith("torch.")] if isinstance(found, type) else [found]
    return "".join(inspect.getsource(inspect.unwrap(one) if callable(one) else one) for one in of)


@pytest.mark.parametrize("place", LINES)
def test_torch_does_what_ours_counts_on(place: str) -> None:
    assert [line for line in LINES[place] if not re.search(line, source(place))] == []


def test_there_is_one_place_where_a_rendezvous_unpickles() -> None:
    """In front of which the HMAC stands (mingpt/world/rendezvous.py)."""
    module = resolve_name(f"{ELASTIC}.rendezvous.dynamic_rendezvous")
    folder = Path(inspect.getfile(module)).parent.parent
    found = [p.name for p in folder.rglob("*.py") for line in p.read_text().splitlines() if "pickle.loads(" in line]
    assert found == ["dynamic_rendezvous.py"]


def test_torch_is_bounded_to_what_was_tested() -> None:
    """`make test-nightly` runs the fast tests with the oldest and the newest."""
    [oldest] = re.findall(r'"torch>=(\d+\.\d+),<3"', (ROOT / "pyproject.toml").read_text())
    nightly = re.findall(r"test-torch TORCH=(\d+\.\d+)\.\d+$", (ROOT / "Makefile").read_text(), re.M)
    assert nightly == [oldest, ".".join(map(str, TORCH))]
