"""Digests of known machines: a machine of the same kind that computes others is broken, or set up otherwise."""

import json
from pathlib import Path
from typing import Any

from mingpt.selftest.result import Result

TABLE = Path(__file__).with_name("known.json")
# A CPU's libraries choose kernels by what one model or another can do; the probe tells such models apart.
KIND = ("device", "cpu", "torch", "cuda", "gpu", "probe", "numerics")


def row(about: dict[str, Any], digests: dict[str, str], run: str) -> dict[str, Any]:
    """run: the digest of the undisturbed run, "" if there was none."""
    return {
        **{key: about.get(key) for key in KIND},
        "probe": about["probe"] if about.get("cpu") else None,
        "run": run,
        "digests": digests,
    }


def compare(mine: dict[str, Any], table: Path = TABLE) -> Result:
    """With the row of the same kind, as far as both have the same cases."""
    rows = json.loads(table.read_text())
    same = [known for known in rows if all(known.get(key) == mine[key] for key in KIND)]
    if not same:
        return Result("known machines", None, f"none of the {len(rows)} known ones is of this kind")
    known = same[0]["digests"]
    other = sorted(name for name, digest in mine["digests"].items() if known.get(name, digest) != digest)
    if mine["run"] and same[0]["run"] and mine["run"] != same[0]["run"]:
        other.append("the undisturbed run")
    text = f"others than a known machine of this kind: {', '.join(other)}" if other else "as a known one of this kind"
    return Result("known machines", not other, text)
