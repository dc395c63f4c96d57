"""mingpt selftest: a machine that computes otherwise is seen, and a good one passes."""

import json
import os
import signal
import sys
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch

from mingpt.selftest import bits
from mingpt.selftest.check import TABLE, compare, judge
from tests.kits.node_kit import Node, wait_until
from tests.kits.paths_kit import ran

CPU = torch.device("cpu")


def test_a_result_that_changes_and_a_kernel_that_is_not_here_are_seen() -> None:
    def absent() -> bits.Case:
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    digests = cycle(["a", "a", "b"])
    works = {"good": lambda: lambda: "g", "sick": lambda: lambda: next(digests), "cudnn": absent}
    assert bits.repeat(works, CPU, 0.0, 600.0) == {
        "digests": {"good": {"g": 3}, "sick": {"a": 2, "b": 1}},
        "absent": {"cudnn": "not here: No available kernel. Aborting execution."},
    }


def test_what_was_not_done_within_the_limit_is_said_and_judged_where_it_was_done() -> None:
    def make(name: str) -> Callable[[], bits.Case]:
        return lambda: lambda: name

    works = {name: make(name) for name in ("a", "b", "c")}
    short = json.loads(json.dumps(bits.repeat(works, CPU, 0.0, 0.0)))
    assert short == {"digests": {"a": {"a": 1}}, "absent": dict.fromkeys("bc", "not done within 0 s (--limit)")}
    whole = {"digests": {"a": {"a": 3}, "b": {"b": 3}, "c": {"c": 3}}, "absent": {}}
    left = [(name, None, short["absent"][name]) for name in "bc"]
    assert judge([short]) == [("a", None, "a, computed once"), *left]
    assert judge([short, whole]) == [("a", True, "a"), *left]
    assert judge([whole, short]) == [(name, True, name) for name in "abc"]


def test_a_process_that_differs_from_the_others_is_named() -> None:
    good, sick = ({"digests": {"gpt2": counts}, "absent": {}} for counts in ({"a": 4}, {"a": 3, "b": 1}))
    [(what, ok, found)] = judge([good, sick])
    assert (what, ok) == ("gpt2", False)
    assert found.endswith("[{'a': 4}, {'a': 3, 'b': 1}]")


@pytest.mark.parametrize("row", json.loads(TABLE.read_text()), ids=lambda row: row["device"])
def test_each_known_machine_is_known_with_its_versions_only(row: dict[str, Any]) -> None:
    name, digests = next(iter(row["digests"])), row["digests"]
    new = {"a case that is not in the table": "x", name: digests[name]}  # one that only one of them has says nothing
    assert compare(row)[1:] == compare({**row, "digests": new})[1:] == (True, "the same as here")
    assert compare({**row, "digests": {**digests, name: "another"}})[1:] == (False, f"others than here: {name}")
    other = {"torch": "2.99.0", "cuda": "99.0", "mingpt": 99, "gpu": {**(row["gpu"] or {}), "cudnn": 1}}
    for key, value in other.items():  # its bits may be others, rightly
        assert compare({**row, key: value, "digests": {**digests, name: "another"}})[1] is None


def test_all_cases_of_this_machine_repeat_and_differ_from_each_other() -> None:
    found = bits.repeat(bits.cases(CPU, compiled=False), CPU, 0.0, 600.0)["digests"]
    assert [len(counts) for counts in found.values()] == [1] * 13, found
    assert len({next(iter(counts)) for counts in found.values()}) == 13


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 600])
def test_it_answers_with_json_and_a_row_and_shows_how_far_it_is(limit: int) -> None:
    command = ["-m", "mingpt", "selftest", "--seconds", "0", "--limit", str(limit), "--json", "--device", "cpu"]
    ended, cases = ran([sys.executable, *command]), [*bits.cases(CPU, compiled=False)]
    done = cases if limit else cases[:1]
    found = json.loads(ended.stdout)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("case ")]
    assert lines == [f"case {number} of {len(cases)}: {name}" for number, name in enumerate(done, 1)]
    left = [r["what"] for r in found["results"] if r["found"] == "not done within 0 s (--limit)"]
    assert left == [name for name in cases if name not in done]
    # This machine may differ from a known one of its kind; all else is a fault of ours.
    assert [r["what"] for r in found["results"] if r["ok"] is False] in ([], ["known machines"])
    assert ended.returncode == (0 if found["ok"] else 1)
    assert found["row"].keys() == json.loads(TABLE.read_text())[0].keys()
    assert [*found["row"]["digests"]] == done


@pytest.mark.slow
def test_nothing_is_left_of_one_that_is_ended() -> None:
    node = Node([sys.executable, "-m", "mingpt", "selftest", "--seconds=600", "--device=cpu"])
    wait_until(lambda: any("selftest.bits" in command for command in node.processes().values()), "steps are computed")
    os.kill(node.process.pid, signal.SIGTERM)
    assert node.wait() == 143
    node.assert_nothing_left()
