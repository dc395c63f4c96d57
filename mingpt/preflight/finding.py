"""A finding: what is wrong, on which node, and what to do about it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

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
