"""A finding (what is wrong, on which node, what to do), and the report of all nodes: a table with them, or JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mingpt.console import counted
from mingpt.errors import CRASHED, FINISHED, USER_ERROR, TransientError, UserError

Level = Literal["warning", "problem", "unreachable"]
ORDER: tuple[Level, ...] = ("problem", "unreachable", "warning")


@dataclass(frozen=True)
class Finding:
    """level: warning: training works, but slower or otherwise than meant. problem: training can't work until the user
    acts. unreachable: a node can't be reached now, and may be later.
    """

    level: Level
    node: str
    check: str
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.level} on {self.node} ({self.check}): {self.text}: {self.advice}"


def findings_of(error: UserError | TransientError, node: str, check: str) -> list[Finding]:
    """The problems of an error as findings. Each problem ends with what to do, after its last colon."""
    problems = error.problems if isinstance(error, UserError) else (str(error),)
    return [Finding("problem", node, check, *_split_advice(problem)) for problem in problems]


def _split_advice(problem: str) -> tuple[str, str]:
    text, _, advice = problem.rpartition(": ")
    return (text, advice) if text else (advice, "correct it")


def exit_code(findings: Iterable[Finding]) -> int:
    levels = {finding.level for finding in findings}
    return USER_ERROR if "problem" in levels else CRASHED if "unreachable" in levels else FINISHED


GIB = 2**30
COLUMNS = ("node", "host", "address", "interface", "processes", "GPUs", "CPUs", "torch", "disk", "memory")


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

    def __post_init__(self) -> None:
        self.findings = sorted(self.findings, key=lambda f: ORDER.index(f.level))

    def as_json(self) -> str:
        told = {"code": self.code, "seconds": round(self.seconds, 1), "nodes": self.nodes, "notes": self.notes}
        return json.dumps({**told, "findings": [asdict(f) for f in self.findings]}, indent=1)

    def as_text(self) -> str:
        """On the head, the table and all findings; on another node, its own findings."""
        findings = self.findings
        bad = sum(f.level != "warning" for f in findings)
        warnings = len(findings) - bad
        counts = f"{counted(bad, 'problem') if bad else 'no problems'}, {counted(warnings, 'warning')}"
        end = f"preflight: {counted(len(self.nodes), 'node')} in {self.seconds:.1f} s: {counts}"
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
    return (
        str(node["rank"]),
        facts["host"],
        facts["address"],
        facts["interface"] or "-",
        str(node["processes"]),
        str(len(facts["gpus"])),
        str(facts["cpus"]),
        facts["torch"] or "-",
        _gib(facts["disk_free"]),
        _gib(facts["memory_free"]),
    )


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / GIB:.1f} GiB"
