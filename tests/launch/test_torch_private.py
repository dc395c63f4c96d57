"""What mingpt takes of torch beyond its documented interface is there, with the parameters that it counts on.

pyproject.toml bounds torch to what these tests have seen. Who raises that bound runs them, and tests/faults.
Each failure names what is gone. The tables are whole: what the code uses and they lack fails, too.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mingpt

PACKAGE = Path(mingpt.__file__).parent
ROOT = PACKAGE.parent
ELASTIC = "torch.distributed.elastic"
AGENT = f"{ELASTIC}.agent.server.local_elastic_agent.LocalElasticAgent"
STATIC = f"{ELASTIC}.rendezvous.static_tcp_rendezvous.StaticTCPRendezvous"
OURS = {AGENT: "mingpt.launch.agent.Agent", STATIC: "mingpt.world.rendezvous.StaticRendezvous"}

# Modules without a promise, and what is imported from them.
NAMES = {
    "torch": ["_C", "_foreach_add_", "_foreach_mul_"],
    "torch.cuda.memory": ["_dump_snapshot"],
    "torch._inductor.config": ["deterministic"],
    "torch._subclasses.fake_tensor": ["FakeTensorMode"],
    "torch.utils._python_dispatch": ["TorchDispatchMode"],
    "torch.utils._pytree": ["tree_leaves"],
    "torch._inductor.decomposition": ["decompositions"],
    "torch.distributed.launcher.api": ["LocalElasticAgent", "launch_agent"],
    "torch.distributed.run": ["get_args_parser", "run"],
    f"{ELASTIC}.agent.server.api": ["RunResult", "WorkerGroup"],
    f"{ELASTIC}.agent.server.local_elastic_agent": ["LocalElasticAgent"],
    f"{ELASTIC}.multiprocessing": ["SignalException"],
    f"{ELASTIC}.multiprocessing.errors": ["ChildFailedError", "ProcessFailure"],
    f"{ELASTIC}.rendezvous.api": [
        "RendezvousClosedError",
        "RendezvousConnectionError",
        "RendezvousError",
        "RendezvousHandler",
        "RendezvousInfo",
        "RendezvousParameters",
        "RendezvousStateError",
        "RendezvousTimeoutError",
        "rendezvous_handler_registry",
    ],
    f"{ELASTIC}.rendezvous.c10d_rendezvous_backend": ["C10dRendezvousBackend"],
    f"{ELASTIC}.rendezvous.dynamic_rendezvous": ["RendezvousBackend", "Token", "create_handler"],
    f"{ELASTIC}.rendezvous.static_tcp_rendezvous": ["StaticTCPRendezvous"],
    f"{ELASTIC}.rendezvous.utils": ["parse_rendezvous_endpoint"],
}
# Methods that ours override, and those that ours call on what they find there.
METHODS = {
    AGENT: {
        "_start_workers": ["self", "worker_group"],
        "_stop_workers": ["self", "worker_group"],
        "_monitor_workers": ["self", "worker_group"],
        "_rendezvous": ["self", "worker_group"],
        "_shutdown": ["self", "death_sig", "timeout"],
    },
    STATIC: {
        "__init__": ["self", "master_addr", "master_port", "rank", "world_size", "run_id", "timeout"],
        "get_backend": ["self"],
        "next_rendezvous": ["self"],
    },
    f"{ELASTIC}.multiprocessing.PContext": {"wait": ["self", "timeout", "period"]},
}
# Attributes of torch's that ours read or set.
ATTRIBUTES = {AGENT: ["_pcontext", "_remaining_restarts", "_worker_group"], STATIC: ["_store", "master_port"]}
# Variables of the environment that torch sets or reads, and where.
VARIABLES = {
    "TORCHELASTIC_ERROR_FILE": f"{ELASTIC}.multiprocessing.api",
    "TORCHELASTIC_RUN_ID": f"{ELASTIC}.agent.server.local_elastic_agent",
    "TORCHELASTIC_USE_AGENT_STORE": f"{ELASTIC}.agent.server.local_elastic_agent",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": f"{ELASTIC}.rendezvous.dynamic_rendezvous",
    "PET_": "torch.distributed.argparse_util",
}
# Lines of torch's code that ours counts on: what breaks without it.
LINES = {
    "LocalElasticAgent(": ("torch.distributed.launcher.api.launch_agent", "our agent never comes in"),
    "self._remaining_restarts > 0": (f"{AGENT}._invoke_run", "our agent can't decide who is started again"),
    "self._shutdown(e.sigval, timeout=": (f"{AGENT}.run", "a request to stop has another limit than ours"),
    "self._monitor_workers(": (f"{AGENT}._invoke_run", "our agent never learns how its workers ended"),
    "if not self._store": (f"{STATIC}.next_rendezvous", "torch opens a store of its own, at every address"),
    "found_inf": ("torch.optim.adamw.adamw", "steps that are not finite are not skipped"),
}


def gone(what: str) -> str:
    return f"torch {torch.__version__} has no {what} any more: bound torch below it in pyproject.toml, or follow it"


def find(path: str) -> object:
    """What a dotted path means: a module, and attributes of it."""
    module, _, rest = path, "", ""
    while True:
        try:
            found: object = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            rest = f"{name}.{rest}" if rest else name
            assert module, gone(path)
    for name in filter(None, rest.split(".")):
        assert hasattr(found, name), gone(path)
        found = getattr(found, name)
    return found


def source(path: str) -> str:
    """The code of a module, a function, or a class and those of torch that it is made of."""
    found = find(path)
    if isinstance(found, type):
        return "".join(inspect.getsource(c) for c in found.__mro__ if c.__module__.startswith("torch."))
    assert callable(found) or inspect.ismodule(found)
    return inspect.getsource(inspect.unwrap(found) if callable(found) else found)


@pytest.mark.parametrize("path", [f"{module}.{name}" for module, names in NAMES.items() for name in names])
def test_a_name_that_ours_imports_is_there(path: str) -> None:
    find(path)


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, of in METHODS.items() for name in of])
def test_a_method_has_the_parameters_that_ours_counts_on(owner: str, name: str) -> None:
    method = find(f"{owner}.{name}")
    assert callable(method)
    assert not getattr(method, "__isabstractmethod__", False), gone(f"{owner}.{name}")
    have, expected = list(inspect.signature(inspect.unwrap(method)).parameters), METHODS[owner][name]
    assert have == expected, gone(f"{owner}.{name}({', '.join(expected)}), but one of ({', '.join(have)})")


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, of in ATTRIBUTES.items() for name in of])
def test_an_attribute_that_ours_uses_is_torchs(owner: str, name: str) -> None:
    assert re.search(rf"self\.{name}\b.*=", source(owner)), gone(f"{owner}.{name}")


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_of_the_environment_is_torchs(variable: str) -> None:
    assert variable in source(VARIABLES[variable]), gone(f"{variable} in {VARIABLES[variable]}")


@pytest.mark.parametrize("line", LINES)
def test_torch_does_what_ours_counts_on(line: str) -> None:
    place, without = LINES[line]
    assert line in source(place), gone(f"`{line}` in {place}, without which {without}")


def test_the_name_that_ours_replaces_is_torchs_agent() -> None:
    name = "torch.distributed.launcher.api.LocalElasticAgent"
    assert find(name) is find(AGENT), gone(f"agent at {name}")


def test_there_is_one_place_where_a_rendezvous_unpickles() -> None:
    """In front of which the HMAC stands (mingpt/world/rendezvous.py)."""
    module = importlib.import_module(f"{ELASTIC}.rendezvous.dynamic_rendezvous")
    folder = Path(inspect.getfile(module)).parent.parent
    found = [p.name for p in folder.rglob("*.py") for line in p.read_text().splitlines() if "pickle.loads(" in line]
    assert found == ["dynamic_rendezvous.py"]


def test_torch_is_bounded_to_what_was_tested() -> None:
    [(major, minor)] = re.findall(r'"torch>=[\d.]+,<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    have = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    assert have < (int(major), int(minor))
    assert have == (int(major), int(minor) - 1), "the bound is above what these tests run with"


# --- the tables are whole ---


def without_promise(module: str) -> bool:
    """Modules that torch's pages describe in parts at most, and may change."""
    inner = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run")
    return module.startswith("torch") and (any(p[0] == "_" for p in module.split(".")) or module.startswith(inner))


def used(file: Path) -> Iterator[str]:
    """The dotted paths of all that a file takes of torch without a promise."""
    called: dict[str, str] = {}  # what the file calls a module: its path
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            called |= {a.asname: a.name for a in node.names if a.asname} | {"torch": "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                try:
                    importlib.import_module(path)
                    called[alias.asname or alias.name] = path
                except ModuleNotFoundError:
                    if without_promise(str(node.module)) or alias.name.startswith("_"):
                        yield path
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in called:
            module = called[node.value.id]
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            if module.startswith("torch") and (private or without_promise(module)):
                yield f"{module}.{node.attr}"


def test_each_name_without_a_promise_is_in_the_table() -> None:
    names = {f"{module}.{name}" for module, of in NAMES.items() for name in of}
    found = {path for file in PACKAGE.rglob("*.py") for path in used(file)}
    assert found - names == set(), "add them to NAMES"
    # launch_agent is called by torch itself, and the agent's name is replaced by a string.
    assert names - found == {f"torch.distributed.launcher.api.{n}" for n in NAMES["torch.distributed.launcher.api"]}


@pytest.mark.parametrize("owner", OURS)
def test_each_method_that_ours_overrides_is_in_the_table(owner: str) -> None:
    """A method of ours that torch gets one day under the same name is an override that nobody meant."""
    theirs, ours = find(owner), find(OURS[owner])
    assert isinstance(theirs, type)
    common = {"__module__", "__doc__", "__abstractmethods__", "_abc_impl", "__init__", "__firstlineno__"}
    overridden = {name for name in vars(ours) if hasattr(theirs, name)} - common
    assert overridden == METHODS[owner].keys() - {"__init__"}, "add them to METHODS, or rename ours"


@pytest.mark.parametrize("owner", OURS)
def test_each_private_attribute_is_in_the_table(owner: str) -> None:
    module, _, name = OURS[owner].rpartition(".")
    file = Path(inspect.getfile(importlib.import_module(module)))
    [mine] = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ClassDef) and n.name == name]
    attributes = [n for n in ast.walk(mine) if isinstance(n, ast.Attribute)]
    on_self = {a.attr for a in attributes if isinstance(a.value, ast.Name) and a.value.id == "self"}
    of_torch = {a for a in on_self if re.search(rf"self\.{a}\b.*=", source(owner))}
    private = {a for a in of_torch if a.startswith("_")} - METHODS[owner].keys()
    assert private == {a for a in ATTRIBUTES[owner] if a.startswith("_")}, "add them to ATTRIBUTES, or rename ours"


def test_each_variable_of_torchs_is_in_the_table() -> None:
    found = {v for file in PACKAGE.rglob("*.py") for v in re.findall(r'"(TORCH[A-Z]*_[A-Z_]+)"', file.read_text())}
    documented = {"TORCH_NCCL_RETHROW_CUDA_ERRORS"}  # by torch; what reads it is in its C++, for GPUs only
    assert found - {"TORCH_DTYPES"} - documented == VARIABLES.keys() - {"PET_"}, "add them to VARIABLES"
