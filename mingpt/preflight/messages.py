"""What the nodes send each other: its shape. A node of another version, or a stranger, may have sent something else."""

from typing import TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from mingpt.cli.console import printable
from mingpt.preflight.finding import Finding
from mingpt.preflight.helper import Unreached

T = TypeVar("T")


class Facts(BaseModel):
    """See machine.facts; visible, capability, nccl: meeting.about."""

    host: str
    address: str
    interface: str | None
    mtu: int | None
    infiniband: list[str]
    gpus: list[str]
    driver: str | None
    cpus: int
    python: str
    torch: str | None
    project: str
    disk_free: int | None
    memory_free: int | None
    visible: list[str]
    capability: str | None
    nccl: str | None


class About(BaseModel):
    """See Inspection._about_me."""

    rank: int
    identity: str
    facts: Facts
    processes: int
    addresses: list[tuple[str, str]]
    port: int
    environment: dict[str, str] | None


# By rank; None: of a node that has not answered.
MET = TypeAdapter(list[tuple[str, str] | None])  # identity, address
NODES = TypeAdapter(list[About | None])
# Clock, whether it has written (None: its disk or store does not answer), identity, host.
PLACES = TypeAdapter(list[tuple[float, bool | None, str, str] | None])
FINDINGS = TypeAdapter(list[list[Finding] | None])
RESULTS = TypeAdapter(list[float | str | None])  # bytes a second, or what failed


def read(shape: TypeAdapter[list[T]], answers: object, size: int) -> list[T]:
    """The answers of `size` nodes, by rank. Raises Unreached if they have another shape."""
    try:
        checked = shape.validate_python(answers)
    except ValidationError as error:
        rank, *place = error.errors()[0]["loc"] or (0,)
        where = printable(f"{'.'.join(map(str, place)) or 'all of it'}")
        what = f"what node {rank} has sent can't be read here ({where})"
        raise Unreached(f"{what}; bring the same commit of this project to every node") from error
    if len(checked) != size or checked[0] is None:
        raise Unreached(f"the head has sent the answers of {len(checked)} nodes, or none of its own; {size} are meant")
    return checked
