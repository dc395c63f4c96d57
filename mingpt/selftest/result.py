"""What one check of `mingpt selftest` found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """ok: None if nothing can be right or wrong here: a measurement, or what was not tried."""

    what: str
    ok: bool | None
    found: str

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "    "}[self.ok]
        return f"{mark}  {self.what}: {self.found}"
