"""A finding (what is wrong, on which node, what to do), and the report of all nodes: a table with them, or JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mingpt.cli.console import columns
from mingpt.errors import CRASHED, FINISHED, USER_ERROR, TransientError, UserError

Level = Literal["warning", "problem", "unreachable"]
ORDER: tuple[Level, ...] = ("problem", "unreachable", "warning")


@dataclass(frozen=True)
class Finding:
    """What is wrong, on which node, and what to do."""

    # warning: training works, but slower or otherwise than meant. problem: training can't work until the user acts.
    # unreachable: a node can't be reached now, and may be later, so a job may be tried again (70).
    level: Level
    node: str
    check: str  # a word for what was looked at, such as "disk"
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.level} on {self.node} ({self.check}): {self.text}: {self.advice}"


def findings_of(error: UserError | TransientError, node: str, check: str) -> list[Finding]:
    """The problems of an error as findings. Each problem ends with what to do, after its last colon."""
    findings: list[Finding] = []
    for problem in getattr(error, "problems", (str(error),)):
        text, _, advice = problem.rpartition(": ")
        findings.append(Finding("problem", node, check, text or "failed", advice))
    return findings


def exit_code(findings: Iterable[Finding]) -> int:
    levels = {finding.level for finding in findings}
    return USER_ERROR if "problem" in levels else CRASHED if "unreachable" in levels else FINISHED


GIB = 2**30
COLUMNS = ("node", "host", "address", "interface", "processes", "GPUs", "CPUs", "torch", "disk", "memory")


@dataclass
class Report:
    """What a node prints at the end: its findings, or all nodes' on the head."""

    nodes: list[dict[str, Any]]  # what each node has sent
    findings: list[Finding]
    notes: list[str]  # lines between the table and the findings
    seconds: float  # that the preflight has taken
    name: str  # of the node that prints the report, as is the rank
    rank: int

    @property
    def code(self) -> int:
        return exit_code(self.findings)

    def __post_init__(self) -> None:
        self.findings = sorted(self.findings, key=lambda f: ORDER.index(f.level))

    def as_text(self) -> str:
        """The table and all findings on the head; on another node, its own findings."""
        bad = sum(f.level != "warning" for f in self.findings)
        counts = f"nodes {len(self.nodes)}, problems {bad}, warnings {len(self.findings) - bad}"
        end = f"preflight in {self.seconds:.1f} s: {counts}"
        if self.rank > 0:
            own = [str(f) for f in self.findings if f.node == self.name]
            return "\n".join([*own, f"{end} (the table is in {self.nodes[0]['facts']['host']}'s output)"])
        table = columns([COLUMNS, *map(_row, self.nodes)])
        return "\n".join([*table, *self.notes, *map(str, self.findings), end])


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
