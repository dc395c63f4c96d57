"""What mingpt.launch takes of torch beyond its documented interface is there, with the parameters that it counts on.

pyproject.toml bounds torch to what these tests have seen. Who raises that bound runs them, and
tests/faults/test_faults.py.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher import api

from paths_kit import ROOT

METHODS: dict[type, dict[str, list[str]]] = {
    LocalElasticAgent: {
        "_start_workers": ["self", "worker_group"],
        "_stop_workers": ["self", "worker_group"],
        "_monitor_workers": ["self", "worker_group"],
        "_rendezvous": ["self", "worker_group"],
        "_shutdown": ["self", "death_sig", "timeout"],
    },
    StaticTCPRendezvous: {
        "__init__": ["self", "master_addr", "master_port", "rank", "world_size", "run_id", "timeout"],
        "next_rendezvous": ["self"],
    },
}


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, of in METHODS.items() for name in of])
def test_a_method_that_ours_overrides_has_the_parameters_that_it_counts_on(owner: type, name: str) -> None:
    method = getattr(owner, name, None)
    assert method is not None, f"torch {torch.__version__} has no {owner.__name__}.{name} any more"
    assert list(inspect.signature(inspect.unwrap(method)).parameters) == METHODS[owner][name]


def test_the_launcher_takes_its_agent_from_a_name_that_ours_replaces() -> None:
    assert vars(api)["LocalElasticAgent"] is LocalElasticAgent
    assert "LocalElasticAgent(" in inspect.getsource(api.launch_agent)


@pytest.mark.parametrize("name", ["_pcontext", "_remaining_restarts", "_worker_group"])
def test_an_attribute_that_ours_reads_is_the_agents(name: str) -> None:
    source = "".join(inspect.getsource(c) for c in LocalElasticAgent.__mro__ if c.__module__.startswith("torch."))
    assert re.search(rf"self\.{name}\b.*=", source), f"torch {torch.__version__}'s agent has no {name} any more"


def test_the_static_rendezvous_makes_a_store_only_where_it_has_none() -> None:
    source = inspect.getsource(StaticTCPRendezvous)
    assert "self._store" in source
    assert re.search(r"if not self\._store|if self\._store is None|self\._store = ", source)


def test_there_is_one_place_where_a_rendezvous_unpickles() -> None:
    """In front of which the HMAC stands (mingpt/world/rendezvous.py)."""
    folder = Path(inspect.getfile(dynamic_rendezvous)).parent.parent
    found = [p.name for p in folder.rglob("*.py") for line in p.read_text().splitlines() if "pickle.loads(" in line]
    assert found == ["dynamic_rendezvous.py"]


def test_torch_is_bounded_to_what_was_tested() -> None:
    [(major, minor)] = re.findall(r'"torch>=[\d.]+,<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    have = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    assert have < (int(major), int(minor))
    assert have == (int(major), int(minor) - 1), "the bound is above what these tests run with"
