"""The names of files and folders in a store, and what they mean."""

import re
from dataclasses import dataclass

from mingpt.snapshot.format import MANIFEST, PART_NAME

STEP_FOLDER = re.compile(r"step-([0-9]{9}|[1-9][0-9]{9})")  # train.max_steps goes to 2^31 - 1
SNAPSHOTS, METRICS = "snapshots", "metrics"  # folders in a run's directory
PROBE, SET_ASIDE = ".probe-", "set-aside-"
REWOUND, OVERTAKEN = "rewound-", "overtaken-"  # in its manifest's name: why a good snapshot was set aside


def step_name(step: int) -> str:
    return f"step-{step:09d}"


@dataclass(frozen=True)
class File:
    """A file in a step's folder, or beside the steps' folders (step None).

    size (bytes) and modified (Unix time) are None if the store does not report them.
    """

    step: int | None
    name: str
    size: int | None
    modified: float | None

    @property
    def path(self) -> str:
        """Relative to the store's URL."""
        return self.name if self.step is None else f"{step_name(self.step)}/{self.name}"

    @property
    def is_temporary(self) -> bool:
        return self.name.startswith(".") and self.name.endswith(".tmp")

    @property
    def is_probe(self) -> bool:
        return self.step is None and self.name.startswith(PROBE)

    @property
    def is_set_aside(self) -> bool:
        return self.name.startswith(SET_ASIDE) and self.name.endswith(MANIFEST)

    @property
    def was_damaged(self) -> bool:
        """Whether this is the manifest of a snapshot that was set aside as damaged, and not as rewound or overtaken."""
        return self.is_set_aside and not self.name.startswith((SET_ASIDE + REWOUND, SET_ASIDE + OVERTAKEN))

    @property
    def was_rewound(self) -> bool:
        return self.is_set_aside and self.name.startswith(SET_ASIDE + REWOUND)

    @property
    def is_ours(self) -> bool:
        """Whether this program may have put it into a step's folder."""
        part = PART_NAME.fullmatch(self.name) is not None
        return part or self.is_temporary or self.is_set_aside
