"""The report of all nodes: a table and a line for each finding, or JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mingpt.preflight.finding import ORDER, Finding, exit_code

GIB = 2**30
COLUMNS = ("node", "host", "address", "interface", "processes", "GPUs", "CPUs", "torch", "to others", "disk", "memory")


@dataclass
class Report:
    """nodes: what each node has sent. notes: lines between the table and the findings."""

    nodes: list[dict[str, Any]]
    findings: list[Finding]
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    rank: int = 0  # of the node that prints the report

    @property
    def code(self) -> int:
        return exit_code(self.findings)

    def plain(self) -> dict[str, Any]:
        ordered = sorted(self.findings, key=lambda f: ORDER.index(f.level))
        return {
            "code": self.code,
            "seconds": round(self.seconds, 1),
            "nodes": self.nodes,
            "findings": [asdict(f) for f in ordered],
            "notes": self.notes,
        }

    def as_json(self) -> str:
        return json.dumps(self.plain(), indent=1)

    def as_text(self) -> str:
        """On the head, the table and all findings; on another node, its own findings."""
        findings = sorted(self.findings, key=lambda f: ORDER.index(f.level))
        bad = sum(f.level != "warning" for f in findings)
        warnings = len(findings) - bad
        counts = f"{bad or 'no'} problem{'s' * (bad != 1)}, {warnings} warning{'s' * (warnings != 1)}"
        end = f"preflight: {len(self.nodes)} node{'s' * (len(self.nodes) != 1)} in {self.seconds:.1f} s: {counts}"
        if self.rank > 0:
            mine = next(n["facts"]["host"] for n in self.nodes if n["rank"] == self.rank)
            head = self.nodes[0]["facts"]["host"]
            return "\n".join(
                [*(str(f) for f in findings if f.node == mine), f"{end} (the table is in {head}'s output)"]
            )
        rows = [COLUMNS, *(_row(node) for node in self.nodes)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *self.notes, *map(str, findings), end])


def _row(node: Mapping[str, Any]) -> Sequence[str]:
    facts = node["facts"]
    rtts = [link["rtt"] for link in node["links"] if not link["error"]]
    return (
        str(node["rank"]),
        facts["host"],
        facts["address"],
        facts["interface"] or "-",
        str(node["processes"]),
        str(len(facts["gpus"])),
        str(facts["cpus"]),
        facts["torch"] or "-",
        f"{max(rtts) * 1000:.2f} ms" if rtts else "-",
        _gib(facts["disk_free"]),
        _gib(facts["memory_free"]),
    )


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / GIB:.1f} GiB"
